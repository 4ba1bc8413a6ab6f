"""Host memory registered with CUDA, which is then copied by DMA at the speed of the bus.

A refusal is never an error: memory that is not pinned is copied right, and slowly. So it is told,
with what is known of the reason and what to do about it.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from s3kv.host.limits import MemoryLimits, memory_limits

logger = logging.getLogger(__name__)

_PIECE_BYTES = 2**30
"""Registered at once, about: a call takes a fraction of a second per GiB, and a limit is then met
with most of the slab already pinned."""
COST = (
    "what is not pinned is copied through a buffer of the driver, several times slower, and each "
    "such copy holds a thread of the worker until it is done"
)
_RAISE_LIMIT = (
    "raise what a process may lock: ulimit -l unlimited, LimitMEMLOCK=infinity, "
    "docker run --ulimit memlock=-1"
)
_FREE_MEMORY = "set host_bytes lower, or give the machine or the container more free memory"
_MEANINGS = {
    1: (
        "cudaErrorInvalidValue",
        "CUDA cannot pin these pages",
        "look for NVRM in the kernel's log (dmesg)",
    ),
    2: ("cudaErrorMemoryAllocation", "the driver found no memory to pin", _FREE_MEMORY),
    304: (
        "cudaErrorOperatingSystem",
        "a call of the operating system failed",
        "look for NVRM in the kernel's log (dmesg)",
    ),
    712: (
        "cudaErrorHostMemoryAlreadyRegistered",
        "something else in this process has registered the same memory",
        "report it: nobody but s3kv should know of this memory",
    ),
    800: (
        "cudaErrorNotPermitted",
        "the driver does not permit it now",
        "report it: no CUDA graph should be under capture when memory is pinned",
    ),
    801: (
        "cudaErrorNotSupported",
        "this GPU, as it is passed on to this machine, registers no memory of the host",
        "run where cudaDevAttrHostRegisterSupported is 1: no setting of s3kv's changes that",
    ),
}
"""What cudaHostRegister may answer, by the values of cudaError_t: name, meaning, what to do."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why CUDA did not register memory, for a log line or for doctor."""

    reason: str
    remedy: str

    @classmethod
    def of(cls, code: int, wanted_bytes: int, limits: MemoryLimits) -> Refusal:
        """Pure. code: what cudaHostRegister returned. wanted_bytes: of all that is to be pinned."""
        name, meaning, remedy = _MEANINGS.get(
            code, ("an error unknown to s3kv", "see cudaError_t in CUDA's manual", _FREE_MEMORY)
        )
        locked = limits.locked_bytes
        # NVIDIA's open kernel module does not count them (os-mlock.c); that is no promise.
        if code in (1, 2) and locked is not None and locked < wanted_bytes:
            remedy = f"{remedy}; where the driver counts it as locked memory, {_RAISE_LIMIT}"
        return cls(f"{name} ({code}): {meaning}; {limits}", remedy)


def pin(memory: torch.Tensor, unit_bytes: int, device: torch.device) -> dict[int, int]:
    """As `register`, with a warning in the log for a refusal."""
    registered, refusal = register(memory, unit_bytes, device)
    if refusal is not None:
        logger.warning(
            "s3kv: CUDA pinned %d of the %d bytes of a slab of host memory, and no more: %s. To "
            "have it pinned, %s. Going on without: %s",
            sum(registered.values()),
            memory.numel(),
            refusal.reason,
            refusal.remedy,
            COST,
        )
    return registered


def register(
    memory: torch.Tensor, unit_bytes: int, device: torch.device
) -> tuple[dict[int, int], Refusal | None]:
    """Register memory with CUDA, piece by piece, on the current device: {address: bytes}, and why
    there is no more of it.

    A DMA must not cross from one registered piece to the next, so pieces are whole units: slots,
    or what an extent cannot cross. The first refusal ends it; the rest stays unpinned.
    """
    registered: dict[int, int] = {}
    for address, nbytes in _pieces(memory, unit_bytes):
        code = int(_cudart().cudaHostRegister(address, nbytes, 0))
        if code:
            _forget_error(device)
            return registered, Refusal.of(code, memory.numel(), memory_limits())
        registered[address] = nbytes
    return registered, None


def unpin(registered: dict[int, int]) -> None:
    """Undo `pin`. No copy may be running."""
    for address, nbytes in registered.items():
        code = int(_cudart().cudaHostUnregister(address))
        if code:
            logger.warning(
                "s3kv: CUDA did not give %d pinned bytes back (error %d); they stay pinned until "
                "this process ends",
                nbytes,
                code,
            )
    registered.clear()


def _pieces(memory: torch.Tensor, unit_bytes: int) -> Iterator[tuple[int, int]]:
    total, piece = memory.numel(), memory.numel()
    if unit_bytes % mmap.PAGESIZE == 0:
        piece = max(1, _PIECE_BYTES // unit_bytes) * unit_bytes
    for begin in range(0, total, piece):
        yield memory.data_ptr() + begin, min(piece, total - begin)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _forget_error(device: torch.device) -> None:
    """CUDA keeps the error of a call that failed and hands it to whoever asks next, which is the
    engine's next kernel launch. Launch one of our own to take it.
    """
    try:
        torch.zeros(1, device=device)
    except RuntimeError:
        logger.debug("took the error that a call of CUDA's had left behind")
