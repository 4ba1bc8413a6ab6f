"""Slab: the host memory that a worker and its I/O process share.

It is an unnamed memory file (`memfd_create(2)`), so it is freed when the last process that maps it
ends, however it ends. The worker creates it and hands the descriptor to the I/O process, which
attaches. `s3kv.host.table`, not this module, decides which job owns a slot; a slot has one owner at
a time. The node and size of the pages are requested before they are touched; see
docs/decisions/0007.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import glob
import logging
import mmap
import os
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from s3kv.errors import ConfigError, UnsupportedError
from s3kv.host.limits import ROOT, Plan, memory_limits
from s3kv.host.placement import (
    FIRST_TOUCH,
    SETTING,
    NodeChoice,
    gives_huge_pages,
    prefer_node,
    shmem_policy,
)
from s3kv.types import ENGINE_LOG

logger = logging.getLogger(__name__)
_engine_logger = logging.getLogger(ENGINE_LOG)

_PAGE_BYTES = mmap.PAGESIZE
_MADV_POPULATE_WRITE = 23
"""madvise(2), Linux 5.14: fault the pages in, writable. Not among the constants of `mmap`."""
PREFAULT_BYTES = 16 * 2**20
"""Bytes prefaulted between two calls of `stop`: 10 to 40 ms of work."""
_SCRATCH_BYTES = 2**20
_THREADS = 8
"""Most threads that allocate pages."""
_NAME = "s3kv-slab"
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Slab:
    """Shared memory of a fixed size in one process.

    view: the whole slab, writable, one byte per item. Slices of it may be kept; see `close`.
    fd: the memory file, to be passed to a child process. Owned by the slab.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        """Use `create` or `attach`."""
        self._map = mmap.mmap(fd, nbytes)
        self.fd = fd
        self.nbytes = nbytes
        self.view = memoryview(self._map)

    @classmethod
    def create(
        cls,
        nbytes: int,
        *,
        node: NodeChoice = FIRST_TOUCH,
        huge_pages: bool = False,
        planned: Plan = (),
    ) -> Slab:
        """A new slab of zeros, `nbytes` rounded up to whole pages.

        node, huge_pages: the preferred node of its pages, and whether to request huge pages. The
        log shows whether Linux complied. If Linux refuses the node, the whole slab is allocated
        here, by threads on that node if that is allowed.
        planned: all slabs that the engine makes on this host, this one included.
        Raises `ConfigError` if this machine or its container has too little memory for these, or
        for the slabs that exist. Linux would notice only later, and kill the process that touches
        one page too many.
        """
        nbytes = -(-nbytes // _PAGE_BYTES) * _PAGE_BYTES
        _check_room(planned, (nbytes, 0))
        fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, nbytes)
            # No holder of the descriptor can shorten the file under another's mapping.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            slab = cls(fd, nbytes)
        except OSError as error:
            os.close(fd)
            raise _too_large(f"{nbytes:,} bytes: {error}; {memory_limits()}") from error
        try:
            # Of processes that pass the first check at the same time, the last sees all slabs here.
            _check_room(planned)
            size = slab.ask_for_huge_pages() if huge_pages else "pages of the ordinary size"
            _engine_logger.info("s3kv: %d bytes of host memory %s, %s", nbytes, node.because, size)
            slab._place(node)
        except BaseException:
            slab.close()
            raise
        return slab

    @classmethod
    def attach(cls, fd: int) -> Slab:
        """Map the whole slab behind `fd`. The new object owns `fd` from now on."""
        return cls(fd, os.fstat(fd).st_size)

    @classmethod
    def behind(cls, view: memoryview) -> Slab:
        """A slab over the file that backs `view`, which is writable and all of a shared mapping. It
        has a mapping and a descriptor of its own, so the owner of the view may unlink the file.
        Raises `UnsupportedError` if this process has no descriptor of such a file."""
        start = ctypes.addressof(ctypes.c_char.from_buffer(view))
        with open("/proc/self/maps") as maps:
            mapped = [line.split(maxsplit=5) for line in maps if line.startswith(f"{start:x}-")]
        # By its path, too: memfds and files in /dev/shm may have the same number.
        wanted = [(it[4], view.nbytes, it[-1].strip()) for it in mapped if int(it[2], 16) == 0]
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # the descriptor of the listing itself
                link = f"/proc/self/fd/{name}"
                found = os.stat(link)
                if (str(found.st_ino), found.st_size, os.readlink(link)) in wanted:
                    return cls.attach(os.dup(int(name)))
        told = f"no file of {view.nbytes:,} bytes is behind the memory that vLLM offloads to"
        raise UnsupportedError(told)

    def ask_for_huge_pages(self) -> str:
        """Request huge pages where this process is the first to touch the memory. Returns the
        outcome in words. Every process that maps the slab has to do this."""
        policy = shmem_policy()
        if policy is None:
            return "ordinary pages (this kernel has no huge ones for shared memory)"
        if not gives_huge_pages(policy):
            return f"ordinary pages (/{SETTING}/shmem_enabled is {policy!r})"
        try:
            self._map.madvise(mmap.MADV_HUGEPAGE)
        except OSError as error:
            return f"ordinary pages (the kernel refused huge ones: {error})"
        return "huge pages, as long as there are any"

    def _place(self, choice: NodeChoice) -> None:
        if choice.node is None:
            return
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        refusal = prefer_node(address, self.nbytes, choice.node)
        if not refusal:
            return
        if processors := choice.processors & os.sched_getaffinity(0):
            # Without a policy, a page comes from the node of the thread that touches it first.
            logger.info(
                "s3kv: %s; allocating from processors of that node instead: %d bytes (100 GiB take "
                "a minute of processor time)",
                refusal,
                self.nbytes,
            )
            self.prefault(processors=processors)
            return
        logger.warning(
            "s3kv: host memory should be %s, but that was refused (%s), and this process may not "
            "run there. The memory will be on the node of the process that first touches it, and "
            "copies to and from the GPU will be slower. Give the container CAP_SYS_NICE, or bind "
            "the engine to that node",
            choice.because,
            refusal,
        )

    def prefault(
        self, stop: Callable[[], bool] = lambda: False, processors: Collection[int] = ()
    ) -> None:
        """Allocate every page and map it into this process, as `allocate` does. The content does
        not change.

        Blocks for about a second per GiB and thread, without the GIL, so run it in a thread: copies
        and receives meanwhile just find some pages missing. Pages are allocated once, by the first
        process to touch them, but each process fills separate page tables: the first write to a
        page costs about as much as copying four. Registering the slab with CUDA fills them, too.
        Call `close` only after this has ended. Raises `ConfigError` if the memory is not there.
        """
        anchor = ctypes.c_char.from_buffer(self._map)  # keeps the mapping alive meanwhile
        if code := allocate(ctypes.addressof(anchor), self.nbytes, processors, stop):
            raise _too_large(f"{self.nbytes:,} bytes: {os.strerror(code)}")

    def close(self) -> None:
        """Release the descriptor and the mapping. Idempotent, never raises.

        The mapping lives until the last slice of `view`, tensor over one, or prefault is gone, so
        their memory stays valid.
        """
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        with contextlib.suppress(BufferError):
            self.view.release()
            self._map.close()


def allocate(
    address: int,
    nbytes: int,
    processors: Collection[int] = (),
    stop: Callable[[], bool] = lambda: False,
) -> int:
    """Populate pages by up to eight threads on `processors`; by one thread anywhere without any.
    `stop` is called every few MiB and ends it early. Returns 0, or an error of `populate`."""

    def work(offset: int) -> int:
        return 0 if stop() else populate(address + offset, min(PREFAULT_BYTES, nbytes - offset))

    bind = partial(os.sched_setaffinity, 0, processors) if processors else None
    with ThreadPoolExecutor(min(_THREADS, len(processors) or 1), initializer=bind) as pool:
        return max(pool.map(work, range(0, nbytes, PREFAULT_BYTES)))


def populate(address: int, nbytes: int) -> int:
    """Allocate pages, and map them into this process, without holding the GIL, as `mmap.madvise`
    would. Returns 0, or the error."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    code = ctypes.get_errno() if libc.madvise(address, nbytes, _MADV_POPULATE_WRITE) else 0
    if code != errno.EINVAL:
        return code
    scratch = ctypes.create_string_buffer(_SCRATCH_BYTES)  # an older kernel: read the pages
    for at in range(0, nbytes, _SCRATCH_BYTES):
        ctypes.memmove(scratch, address + at, min(_SCRATCH_BYTES, nbytes - at))
    return 0


def _check_room(planned: Plan, *wanted: tuple[int, int]) -> None:
    """Raise `ConfigError` if this host has no room for what is planned, or for the slabs that exist
    and those `wanted`, of which no page exists yet."""
    if shortage := memory_limits().shortage(planned, [*existing_slabs(), *wanted]):
        raise _too_large(shortage)


def existing_slabs() -> list[tuple[int, int]]:
    """The size of each slab of `slab_files`, and the bytes it has taken so far."""
    slabs: dict[int, tuple[int, int]] = {}
    for file in slab_files():
        with contextlib.suppress(OSError):  # closed in the meantime
            found = os.stat(file)
            slabs[found.st_ino] = (found.st_size, found.st_blocks * 512)
    return list(slabs.values())


def slab_files(root: Path = ROOT) -> list[str]:
    """The descriptors of slabs in /proc, of every process on this host that this one may look into:
    those of the same user. root: parent directory of /proc."""
    files = []
    for file in glob.iglob(f"{root}/proc/[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # the process has ended, or is another user's
            if os.readlink(file).startswith(f"/memfd:{_NAME}"):
                files.append(file)
    return files


def _too_large(reason: str) -> ConfigError:
    return ConfigError(
        f"too little memory for s3kv: {reason}. Set host_bytes lower, or give the container more "
        "memory"
    )
