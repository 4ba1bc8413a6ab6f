"""KV blocks between a cache in host memory and the slab: `python -m benchmarks.cpu_copies`.

Chunks of 16 blocks of 32 layers, each layer's pages in a buffer of its own, as vLLM has them on a
CPU, copied by the copier of a CPU worker: pages of 8 and of 64 KiB, of random blocks and of
neighbours. "joined" is what format 1 of the objects allowed for neighbours: the 16 pages of a layer
in one copy.

GB/s of the saves and the loads of a chunk, and as a share of one large memmove of as many bytes
right after it. The time is what the fastest tenth of both took, over all chunks of --mib of memory
in --rounds rounds: the others are those of a busy machine. `--out FILE` writes them as JSON.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import quantiles
from time import perf_counter
from typing import Any

import torch

from benchmarks.deadline import ends, say
from benchmarks.rig import machine, publish
from s3kv.device.cpu import CpuCopier
from s3kv.device.layout import PageLayout
from s3kv.device.slot_payloads import ChunkPlaces
from s3kv.messages import LoadPart

LAYERS = 32
CHUNK_BLOCKS = 16
KINDS = ("random", "neighbours", "joined")


class Rig:
    """Caches and a slab of `nbytes` each, and parts that together are all of both."""

    def __init__(self, kind: str, page_bytes: int, nbytes: int) -> None:
        blocks, chunk_blocks = nbytes // LAYERS // page_bytes, CHUNK_BLOCKS
        if kind == "joined":
            blocks, chunk_blocks, page_bytes = blocks // CHUNK_BLOCKS, 1, page_bytes * CHUNK_BLOCKS
        shape = (LAYERS, blocks, 1, 1, page_bytes)
        self.cache = torch.randint(0, 256, (nbytes,), dtype=torch.uint8).view(shape)
        caches = {f"layers.{i}": self.cache[i] for i in range(LAYERS)}
        layout = PageLayout.of(caches, blocks, tuple(caches), chunk_blocks)
        self.slab = mmap.mmap(-1, nbytes)
        slot_bytes = layout.payload_bytes
        self.places = ChunkPlaces({0: layout}, memoryview(self.slab), slot_bytes, {0: 0})
        self.copier = CpuCopier(self.places)
        ids = list(range(blocks))
        if kind == "random":
            random.Random(1).shuffle(ids)
        self.parts = [
            LoadPart(0, slot, 0, tuple(ids[slot * chunk_blocks :][:chunk_blocks]))
            for slot in range(self.places.num_slots)
        ]
        for part in self.parts:  # touches every page
            self.save(part)

    def save(self, part: LoadPart) -> None:
        self.copier.copy_out(part, None)

    def load(self, part: LoadPart) -> None:
        self.copier.copy_in(part, None)

    def move(self, part: LoadPart) -> None:
        """As many bytes in one piece, half of the memory further, where no cache has them."""
        nbytes = self.places.slot_bytes
        at = (part.slot + len(self.parts) // 2) % len(self.parts) * nbytes
        ctypes.memmove(self.places.memory.data_ptr() + at, self.cache.data_ptr() + at, nbytes)


def measure(kind: str, page_bytes: int, nbytes: int, rounds: int) -> dict[str, Any]:
    say(f"pages of {page_bytes // 1024} KiB, blocks: {kind}")
    rig = Rig(kind, page_bytes, nbytes)
    found: dict[str, Any] = {"page_kib": page_bytes // 1024, "blocks": kind}
    for name, copy in (("save", rig.save), ("load", rig.load)):
        pairs = [
            (seconds(copy, part), seconds(rig.move, part))
            for _ in range(rounds)
            for part in rig.parts
        ]
        copy_s, move_s = (quantiles(took, n=10)[0] for took in zip(*pairs, strict=True))
        found[f"{name}_gb_s"] = round(rig.places.slot_bytes / 1e9 / copy_s, 1)
        found[f"{name}_of_move"] = round(move_s / copy_s, 2)
    rig.copier.close()
    return found


def seconds(copy: Callable[[LoadPart], None], part: LoadPart) -> float:
    begin_s = perf_counter()
    copy(part)
    return perf_counter() - begin_s


@ends(600)
def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    result = {
        "command": f"python -m benchmarks.cpu_copies --mib {options.mib} --rounds {options.rounds}",
        "machine": machine(),
        "layers": LAYERS,
        "blocks_per_chunk": CHUNK_BLOCKS,
        "copies": [
            measure(kind, page_kib * 1024, options.mib * 2**20, options.rounds)
            for page_kib in (8, 64)
            for kind in KINDS
        ],
    }
    publish(result, options.out)
    return result


if __name__ == "__main__":
    main()
