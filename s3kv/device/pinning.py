"""Host memory registered with CUDA, which is then copied by DMA at the speed of the bus."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch

logger = logging.getLogger(__name__)

_PIECE_BYTES = 2**30
"""Registered at once, about: a call takes a fraction of a second per GiB, and a limit is then met
with most of the slab already pinned."""
_PAGE_BYTES = 4096


def pin(memory: torch.Tensor, unit_bytes: int, device: torch.device) -> dict[int, int]:
    """Register the slab with CUDA, piece by piece, on the current device. {address: bytes}.

    A DMA must not cross from one registered piece to the next, so pieces are whole units: slots,
    or what an extent cannot cross. The first refusal ends it, with a warning that says what to do;
    the rest stays unpinned.
    """
    registered: dict[int, int] = {}
    for address, nbytes in _pieces(memory, unit_bytes):
        code = int(_cudart().cudaHostRegister(address, nbytes, 0))
        if code:
            _forget_error(device)
            logger.warning(
                "CUDA refused to pin host memory (error %d) after %d of %d bytes of s3kv's slab; "
                "going on unpinned, copies to and from it will be several times slower. Raise "
                "`ulimit -l` (in a container: --ulimit memlock=-1), give the machine more free "
                "memory, or lower host_bytes.",
                code,
                sum(registered.values()),
                memory.numel(),
            )
            break
        registered[address] = nbytes
    return registered


def unpin(registered: dict[int, int]) -> None:
    """Undo `pin`. No copy may be running."""
    for address in registered:
        _cudart().cudaHostUnregister(address)
    registered.clear()


def _pieces(memory: torch.Tensor, unit_bytes: int) -> Iterator[tuple[int, int]]:
    total, piece = memory.numel(), memory.numel()
    if unit_bytes % _PAGE_BYTES == 0:
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
        logger.debug("took the error that cudaHostRegister had left behind")
