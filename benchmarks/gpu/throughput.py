"""GB/s between scattered blocks and slots, beside one large copy over the same bus."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu.machine import Machine, in_turn
from benchmarks.gpu.rig import CopyRig
from benchmarks.gpu.shapes import Model
from s3kv.device.copies import BlockCopies

LARGE_BYTES = 2**29
"""Of the copy to compare with; less than what is registered with CUDA at once."""


def measure(
    machine: Machine, model: Model, block_tokens: int, copied_bytes: int, rounds: int
) -> dict[str, Any]:
    """By direction, GB/s and the fraction of the large copy; medians of rounds in which everything
    that is compared has its turn."""
    rig = CopyRig(machine, model, block_tokens, copied_bytes)
    found: dict[str, Any] = {
        "chunk_bytes": rig.layout.payload_bytes,
        "chunks": rig.count,
        "longest_run_bytes": max(piece.nbytes for piece in rig.layout.pieces),
    }
    return found | rig.measured(lambda copies: _compared(rig, copies, rounds))


def _compared(rig: CopyRig, copies: BlockCopies, rounds: int) -> dict[str, Any]:
    rig.save_all(copies)
    rig.load_all(copies)
    rig.check()
    large = min(LARGE_BYTES, rig.memory.numel())
    host, device = rig.memory[:large], torch.empty(large, dtype=torch.uint8)
    device = device.to(rig.machine.device)
    machine = rig.machine
    ways: dict[str, Callable[[], float]] = {
        "saved": lambda: rig.copied_bytes / rig.save_all(copies),
        "loaded": lambda: rig.copied_bytes / rig.load_all(copies),
        "large_out": lambda: large / machine.seconds(lambda: host.copy_(device, non_blocking=True)),
        "large_in": lambda: large / machine.seconds(lambda: device.copy_(host, non_blocking=True)),
    }
    # The content of the large copy has to be noise, too.
    device.copy_(host)
    per_s = in_turn(ways, rounds, lambda name: ways[name]())
    medians = {name: statistics.median(rates) for name, rates in per_s.items()}
    return {
        "gb_per_s": {name: round(rate / 1e9, 2) for name, rate in medians.items()},
        "least_gb_per_s": {name: round(min(rates) / 1e9, 2) for name, rates in per_s.items()},
        "saved_of_large": round(medians["saved"] / medians["large_out"], 3),
        "loaded_of_large": round(medians["loaded"] / medians["large_in"], 3),
        "pinned": copies.copier.pinned,
    }
