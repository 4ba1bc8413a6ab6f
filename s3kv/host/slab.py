"""The slab: the host memory that a worker and its I/O process share.

It is a memory file (`memfd_create(2)`): it has no name, so it is gone when the last process that
maps it is gone, however that process ended. The worker creates it and hands the descriptor to the
I/O process, which attaches. Who may write where in it is not decided here: a slot belongs to one
job at a time, and `s3kv.host.slots` says to which. Where its pages are, and of what size, is asked
for before anything touches them; docs/decisions/0007 says how and why.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from s3kv.errors import ConfigError
from s3kv.host.huge import SETTING, gives_huge_pages, shmem_policy
from s3kv.host.limits import memory_limits
from s3kv.host.numa import FIRST_TOUCH, NodeChoice, prefer_node

logger = logging.getLogger(__name__)

_PAGE_BYTES = mmap.PAGESIZE
_MADV_POPULATE_WRITE = 23
"""madvise(2), Linux 5.14: fault the pages in, writable. Not among the constants of `mmap`."""
_PIECE_BYTES = 16 * 2**20
"""Prefaulted between two looks at `stop`: 10 to 40 ms of work."""
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Slab:
    """Shared memory of a fixed size in one process.

    view: all of it, writable, one byte per item. Slices of it may be kept; see `close`.
    fd: the memory file, to be passed to a child process. Owned by the slab.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        """Use `create` or `attach`."""
        self._map = mmap.mmap(fd, nbytes)
        self._fd = fd
        self.nbytes = nbytes
        self.view = memoryview(self._map)

    @classmethod
    def create(
        cls, nbytes: int, *, node: NodeChoice = FIRST_TOUCH, huge_pages: bool = False
    ) -> Slab:
        """A new slab of zeros, `nbytes` rounded up to whole pages.

        node, huge_pages: where its pages should come from, and whether large ones are asked for.
        Both are wishes: what came of them is logged. Where Linux takes no wish for a node, all of
        the slab is allocated here, by a thread that runs there.
        Raises `ConfigError` when this machine or its container has not that much memory to give.
        Linux would find out later and with less courtesy, by killing the process that touches the
        page too much.
        """
        nbytes = -(-nbytes // _PAGE_BYTES) * _PAGE_BYTES
        available = memory_limits().available_bytes
        if nbytes > available:
            raise _too_large(nbytes, f"{available:,} bytes are available here")
        fd = os.memfd_create("s3kv-slab", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, nbytes)
            # Whoever holds the descriptor, nobody can shorten the file under another's mapping.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            slab = cls(fd, nbytes)
        except OSError as error:
            os.close(fd)
            raise _too_large(nbytes, str(error)) from error
        size = slab.ask_for_huge_pages() if huge_pages else "pages of the ordinary size"
        logger.info("s3kv: %d bytes of host memory %s, %s", nbytes, node.because, size)
        try:
            slab._place(node)
        except BaseException:
            slab.close()
            raise
        return slab

    @classmethod
    def attach(cls, fd: int) -> Slab:
        """Map all of the slab behind `fd`, which from now on belongs to the new object."""
        return cls(fd, os.fstat(fd).st_size)

    @property
    def fd(self) -> int:
        return self._fd

    def ask_for_huge_pages(self) -> str:
        """Have this process allocate huge pages where it is the first to touch the memory, if
        Linux gives any; what it says to that. Every process that maps the slab has to ask.
        """
        policy = shmem_policy()
        if policy is None:
            return "ordinary pages, for this kernel has no huge ones for shared memory"
        if not gives_huge_pages(policy):
            return f"ordinary pages, for /{SETTING}/shmem_enabled is {policy!r}"
        try:
            self._map.madvise(mmap.MADV_HUGEPAGE)
        except OSError as error:
            return f"ordinary pages, for Linux refused huge ones ({error})"
        return "huge pages as far as there are any"

    def _place(self, choice: NodeChoice) -> None:
        if choice.node is None:
            return
        refusal = prefer_node(self._address, self.nbytes, choice.node)
        if not refusal:
            return
        processors = choice.processors & os.sched_getaffinity(0)
        if processors:
            # Where a page goes that nobody has asked a node for: to the toucher's.
            logger.info("s3kv: %s; allocating from processors of that node instead", refusal)
            with ThreadPoolExecutor(1) as pool:
                pool.submit(self._prefault_on, processors).result()
            return
        logger.warning(
            "s3kv: host memory should be %s, but that was refused (%s), and this process may not "
            "run there: it will be on the node of who touches it first, and copies to and from "
            "the GPU are slower. Give the container CAP_SYS_NICE, or bind the engine to that node",
            choice.because,
            refusal,
        )

    def _prefault_on(self, processors: frozenset[int]) -> None:
        os.sched_setaffinity(0, processors)  # of this thread
        self.prefault()

    @property
    def _address(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def prefault(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Have every page allocated and mapped into this process; what they hold stays.

        Blocks for about a second per GiB, without the GIL, so run it in a thread: copies and
        receives meanwhile just find some pages missing. `stop` is asked every few MiB and ends it
        early. Pages are allocated once, by whoever comes first, but each process has page tables
        of its own to fill: the first write to a page costs about as much as copying four
        (registering the slab with CUDA does it, too). Call `close` only after it has ended. Raises
        `ConfigError` when the memory is not there.
        """
        libc = ctypes.CDLL(None, use_errno=True)
        # mmap.madvise would do the same while holding the GIL.
        libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        # Keeps the mapping from being unmapped meanwhile.
        anchor = ctypes.c_char.from_buffer(self._map)
        start = ctypes.addressof(anchor)
        for offset in range(0, self.nbytes, _PIECE_BYTES):
            if stop():
                return
            piece = min(_PIECE_BYTES, self.nbytes - offset)
            if libc.madvise(start + offset, piece, _MADV_POPULATE_WRITE) == 0:
                continue
            code = ctypes.get_errno()
            if code != errno.EINVAL:
                raise _too_large(self.nbytes, os.strerror(code))
            self._touch(offset, piece)

    def _touch(self, offset: int, nbytes: int) -> None:
        """Prefault as older kernels can: read a byte of every page."""
        bytes(self.view[offset : offset + nbytes : _PAGE_BYTES])

    def close(self) -> None:
        """Give the descriptor and the mapping back. Idempotent, never raises.

        The mapping lives on as long as somebody holds a slice of `view`, a tensor over one or a
        prefault: their memory never goes away under them, it goes away with the last of them.
        """
        if self._fd < 0:
            return
        os.close(self._fd)
        self._fd = -1
        with contextlib.suppress(BufferError):
            self.view.release()
            self._map.close()


def _too_large(nbytes: int, reason: str) -> ConfigError:
    return ConfigError(
        f"host_bytes asks for {nbytes:,} bytes of memory per worker, but {reason}: set host_bytes "
        "lower, or give the container more memory"
    )
