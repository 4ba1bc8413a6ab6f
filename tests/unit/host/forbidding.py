"""A process that may not call `mbind(2)`, as in a container with the usual seccomp profile.

`python -m tests.unit.host.forbidding` makes a slab there that should be on node 0, and prints the
log, and the bytes that are allocated.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import platform
import struct
import sys

from s3kv.host import placement
from s3kv.host.placement import NodeChoice
from s3kv.host.slab import Slab

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
LOAD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, ERRNO = 0x7FFF0000, 0x00050000
PAGES = 8


def forbid(number: int) -> None:
    """Have the kernel answer EPERM to this system call from now on."""
    instructions = [
        (LOAD, 0, 0, 0),  # the number of the call
        (JUMP_IF_EQUAL, 0, 1, number),
        (RETURN, 0, 0, ERRNO | errno.EPERM),
        (RETURN, 0, 0, ALLOW),
    ]
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in instructions)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxP", len(instructions), ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in ((PR_SET_NO_NEW_PRIVS, 1, 0), (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program)):
        if libc.prctl(*arguments, 0, 0):
            raise OSError(ctypes.get_errno(), "prctl")


if __name__ == "__main__":
    logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s")
    forbid(placement._MBIND[platform.machine()])
    node = NodeChoice(0, "on node 0", frozenset(os.sched_getaffinity(0)))
    slab = Slab.create(PAGES * os.sysconf("SC_PAGESIZE"), node=node)
    print(os.fstat(slab.fd).st_blocks * 512, slab.nbytes)
