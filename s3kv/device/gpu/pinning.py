"""Pinning: host memory registered with CUDA, which DMA copies at the speed of the bus.

A refusal is never an error: unpinned memory is copied correctly, but slowly. So a refusal is
reported, with its likely reason and a remedy.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from s3kv.host.limits import MemoryLimits, memory_limits
from s3kv.host.slab import allocate

logger = logging.getLogger(__name__)

_PIECE_BYTES = 2**30
"""Approximate size of one registration. A call takes a fraction of a second per GiB; and a limit is
hit only once most of the slab is pinned."""
_TOLD_PIECES = 16
"""Pieces registered between two lines in the log."""
COST = (
    "unpinned memory is copied through a buffer of the driver, several times slower, and each such "
    "copy blocks a thread of the worker"
)
_RAISE_LIMIT = (
    "raise the limit on locked memory: ulimit -l unlimited, LimitMEMLOCK=infinity, "
    "docker run --ulimit memlock=-1"
)
_FREE_MEMORY = "set host_bytes lower, or give the machine or the container more free memory"
_READ_LOG = "look for NVRM in the kernel's log (dmesg)"
_MEANINGS = {
    1: ("cudaErrorInvalidValue", "CUDA cannot pin these pages", _READ_LOG),
    2: ("cudaErrorMemoryAllocation", "the driver found no memory to pin", _FREE_MEMORY),
    304: ("cudaErrorOperatingSystem", "a call of the operating system failed", _READ_LOG),
    712: (
        "cudaErrorHostMemoryAlreadyRegistered",
        "this process has registered the same memory already",
        "report a bug: only s3kv should know of this memory",
    ),
    800: (
        "cudaErrorNotPermitted",
        "the driver does not permit it now",
        "report a bug: no CUDA graph should be under capture when memory is pinned",
    ),
    801: (
        "cudaErrorNotSupported",
        "this GPU, as this machine sees it, cannot register host memory",
        "run where cudaDevAttrHostRegisterSupported is 1: no setting of s3kv changes that",
    ),
}
"""Errors of cudaHostRegister, by cudaError_t: name, meaning, remedy."""


@dataclass(frozen=True, slots=True)
class PinningRefusal:
    """The reason why CUDA did not register memory, and a remedy, for a log line or for doctor."""

    reason: str
    remedy: str

    @classmethod
    def of(cls, code: int, wanted_bytes: int, limits: MemoryLimits) -> PinningRefusal:
        """The refusal that `code`, from cudaHostRegister, stands for. Pure. wanted_bytes: all the
        memory that is to be pinned."""
        name, meaning, remedy = _MEANINGS.get(
            code, ("an error s3kv does not know", "see cudaError_t in CUDA's manual", _FREE_MEMORY)
        )
        locked = limits.locked_bytes
        # NVIDIA's open kernel module does not count pinned pages (os-mlock.c); that is no promise.
        if code in (1, 2) and locked is not None and locked < wanted_bytes:
            remedy = f"{remedy}; if the driver counts it as locked memory, {_RAISE_LIMIT}"
        return cls(f"{name} ({code}): {meaning}; {limits}", remedy)


def pin(memory: torch.Tensor, unit_bytes: int, device: torch.device) -> dict[int, int]:
    """Register memory as `register` does, and log a warning for a refusal: {address: bytes}."""
    registered, refusal = register(memory, unit_bytes, device)
    if refusal is not None:
        text = "s3kv: CUDA pinned only %d of the %d bytes of a slab of host memory: %s. "
        told = sum(registered.values()), memory.numel(), refusal.reason, refusal.remedy, COST
        logger.warning(text + "To pin all of it, %s. s3kv continues: %s", *told)
    return registered


def register(
    memory: torch.Tensor,
    unit_bytes: int,
    device: torch.device,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[dict[int, int], PinningRefusal | None]:
    """Register memory with CUDA, piece by piece, on the current device. Returns {address: bytes},
    and the refusal if not all of it was registered.

    A DMA must not cross from one registered piece to the next, so pieces are whole units: slots,
    or what an extent cannot cross. The first refusal ends it; the rest stays unpinned. The log has
    the time, every 16 pieces and at the end.
    """
    registered: dict[int, int] = {}
    began_s = clock()
    for number, (address, nbytes) in enumerate(_pieces(memory, unit_bytes), start=1):
        # CUDA would allocate the pages on one thread, while holding a driver lock that other
        # processes wait for. A failure shows when CUDA registers them.
        allocate(address, nbytes, os.sched_getaffinity(0))
        if code := int(_cudart().cudaHostRegister(address, nbytes, 0)):
            _forget_error(device)
            return registered, PinningRefusal.of(code, memory.numel(), memory_limits())
        registered[address] = nbytes
        done = sum(registered.values())
        if number % _TOLD_PIECES == 0 or done == memory.numel():
            took_s = clock() - began_s
            logger.info("s3kv: pinned %d of %d bytes in %.1f s", done, memory.numel(), took_s)
    return registered, None


def unpin(registered: dict[int, int]) -> None:
    """Undo `pin`. No copy may be running."""
    for address, nbytes in registered.items():
        if code := int(_cudart().cudaHostUnregister(address)):
            _forget_error(torch.device("cuda"))
            text = "s3kv: CUDA did not unpin %d bytes (error %d); they stay pinned until the end"
            logger.warning(text, nbytes, code)
    registered.clear()


def _pieces(memory: torch.Tensor, unit_bytes: int) -> Iterator[tuple[int, int]]:
    total, piece = memory.numel(), memory.numel()
    if unit_bytes % mmap.PAGESIZE == 0:
        piece = max(1, _PIECE_BYTES // unit_bytes) * unit_bytes
    for begin in range(0, total, piece):
        yield memory.data_ptr() + begin, min(piece, total - begin)


def _cudart() -> Any:
    return torch.cuda.cudart()


def _forget_error(device: torch.device) -> None:
    """Clear the error of a failed call, which CUDA would report at the engine's next launch."""
    major = str(torch.version.cuda).partition(".")[0]
    try:
        # The library that torch has loaded: each copy of the runtime has errors of its own.
        ctypes.CDLL(f"libcudart.so.{major}", mode=os.RTLD_NOLOAD).cudaGetLastError()
    except OSError:
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=device)  # a launch of our own receives it
