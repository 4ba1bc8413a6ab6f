"""GB/s between scattered blocks and slots, beside one large copy over the same bus."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu.machine import Machine
from benchmarks.gpu.rig import CopyRig
from benchmarks.gpu.shapes import Model
from s3kv.device.copier import PathChoice
from s3kv.device.copies import BlockCopies

LARGE_BYTES = 2**29
"""Of the copy to compare with; less than what is registered with CUDA at once."""


def measure(
    machine: Machine, model: Model, block_tokens: int, copied_bytes: int, rounds: int
) -> dict[str, Any]:
    """By path and direction, GB/s and the fraction of the large copy; medians of rounds in which
    everything that is compared has its turn."""
    rig = CopyRig(machine, model, block_tokens, copied_bytes)
    found: dict[str, Any] = {
        "chunk_bytes": rig.layout.payload_bytes,
        "chunks": rig.count,
        "longest_run_bytes": int(rig.layout.runs((0,), 0).sizes.max()),
    }
    return found | rig.by_path(lambda copies: _compared(rig, copies, rounds))


def _compared(rig: CopyRig, copies: BlockCopies, rounds: int) -> dict[str, Any]:
    rig.save_all(copies)
    rig.load_all(copies)
    rig.check()
    large = min(LARGE_BYTES, rig.memory.numel())
    host, device = rig.memory[:large], torch.empty(large, dtype=torch.uint8)
    device = device.to(rig.machine.device)
    machine = rig.machine
    out, back = (torch.tensor(ids, device=machine.device) for ids in (rig.sources, rig.targets))
    ways: dict[str, Callable[[], float]] = {
        "saved": lambda: rig.copied_bytes / rig.save_all(copies),
        "loaded": lambda: rig.copied_bytes / rig.load_all(copies),
        "large_out": lambda: large / machine.seconds(lambda: host.copy_(device, non_blocking=True)),
        "large_in": lambda: large / machine.seconds(lambda: device.copy_(host, non_blocking=True)),
        "torch_saved": lambda: rig.copied_bytes / machine.seconds(lambda: _torch_save(rig, out)),
        "torch_loaded": lambda: rig.copied_bytes / machine.seconds(lambda: _torch_load(rig, back)),
    }
    # The content of the large copy has to be noise, too.
    device.copy_(host)
    per_s: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, way in ways.items():
            rate = way()
            if turn:  # the first warms up
                per_s[name].append(rate)
    medians = {name: statistics.median(rates) for name, rates in per_s.items()}
    return {
        "gb_per_s": {name: round(rate / 1e9, 2) for name, rate in medians.items()},
        "least_gb_per_s": {name: round(min(rates) / 1e9, 2) for name, rates in per_s.items()},
        "saved_of_large": round(medians["saved"] / medians["large_out"], 3),
        "loaded_of_large": round(medians["loaded"] / medians["large_in"], 3),
        "pinned": copies.copier.pinned,
        "choices": [_plain(choice) for choice in copies.copier.choices],
    }


def _plain(choice: PathChoice) -> dict[str, Any]:
    return {
        "direction": choice.direction.value,
        "path": choice.path.value,
        "batch_s": choice.batch_s,
        "gather_s": choice.gather_s,
    }


def _torch_save(rig: CopyRig, chunks: torch.Tensor) -> None:
    """What one would write first: every layer's blocks gathered, and copied to their place."""
    for slot, where in enumerate(chunks):
        pages, room = _pages_and_room(rig, slot)
        gathered = [torch.index_select(layer, 0, where) for layer in pages]
        room.copy_(torch.stack(gathered, 1), non_blocking=True)


def _torch_load(rig: CopyRig, chunks: torch.Tensor) -> None:
    for slot, where in enumerate(chunks):
        pages, room = _pages_and_room(rig, slot)
        there = room.to(where.device, non_blocking=True)
        for number, layer in enumerate(pages):
            layer.index_copy_(0, where, there[:, number])


def _pages_and_room(rig: CopyRig, slot: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The pages of each layer, [blocks, N, H, C], and their place in a slot."""
    begin = slot * rig.slot_bytes + rig.format.header_bytes
    payload = rig.memory[begin : begin + rig.layout.payload_bytes].view(torch.bfloat16)
    pages = [cache.permute(0, 2, 1, 3) for cache in rig.caches.values()]
    return pages, payload.view(-1, len(pages), *pages[0].shape[1:])
