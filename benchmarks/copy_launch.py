"""What launching a chunk's copies costs a thread of Python: `python -m benchmarks.copy_launch`.

There is no GPU: streams and events do nothing, and the driver's batch call is a function of the C
library that returns at once. What is left is the Python of the copy thread, which holds the GIL of
the engine: from a part to the driver's arguments and to the ticket, on the path of batches.

Chunks of 256 tokens of random blocks, of Llama-3-8B (goal: 20 us) and Llama-3-70B on 8 GPUs (goal:
60 us), with layers outermost in memory, as vLLM has them, and with blocks outermost. Microseconds
of CPU time per chunk: the median of --rounds rounds of --chunks chunks. `--out FILE` writes them as
JSON.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import random
from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from pathlib import Path
from statistics import median
from time import thread_time
from typing import Any

import torch

from benchmarks.deadline import ends
from benchmarks.gpu.shapes import CHUNK_TOKENS, MODELS, Model
from benchmarks.rig import machine, publish
from s3kv.device import copier
from s3kv.device.gpu.cuda import PROTOTYPE, BatchCall
from s3kv.device.gpu.gpu_copier import GpuCopier
from s3kv.device.gpu.interface import Copies
from s3kv.device.layout import PageLayout
from s3kv.device.slot_payloads import ChunkPlaces
from s3kv.messages import LoadPart

BLOCK_TOKENS = 16
BLOCKS = 1024
SLOTS = 2
ORDERS = ("LBNHC", "BLNHC")


class NoEvent:
    def query(self) -> bool:
        return True

    def elapsed_time(self, end: NoEvent) -> float:
        return 0.0


class NoStream:
    """Does nothing but the batch call, whose driver does nothing. descriptors: of the last one."""

    descriptors = 0

    def __init__(self) -> None:
        # Compares its first two arguments, two different pointers, and returns 0.
        nothing = ctypes.cast(ctypes.CDLL(None).pthread_equal, ctypes.c_void_p).value
        assert nothing is not None
        self._call = BatchCall(PROTOTYPE(nothing))

    def wait(self, event: NoEvent) -> None:
        """Wait for nothing."""

    def record(self, event: NoEvent) -> None:
        """Record nothing."""

    def copy_batch(self, copies: Copies, source_is_stable: bool) -> None:
        self.descriptors = len(copies.sizes)
        self._call(copies, source_is_stable, 1)

    def synchronize(self) -> None:
        """There is nothing to wait for."""


class NoGpu:
    no_batch = ""

    def __init__(self) -> None:
        self.stream = NoStream()

    def current_stream(self) -> NoStream:
        return self.stream

    def new_stream(self, *, urgent: bool) -> NoStream:
        return self.stream

    def new_event(self, *, timed: bool = False) -> NoEvent:
        return NoEvent()

    def pin(self, memory: torch.Tensor, unit_bytes: int) -> bool:
        return True

    def unpin(self) -> None:
        """Nothing is pinned."""


def layout_of(model: Model, order: str) -> PageLayout:
    """Over memory that nobody touches."""
    sizes = {"L": model.layers, "B": BLOCKS, "N": BLOCK_TOKENS, "H": model.heads}
    sizes["C"] = model.content
    reach = accumulate((sizes[letter] for letter in reversed(order[1:])), mul, initial=1)
    strides = dict(zip(reversed(order), reach, strict=True))
    buffer = torch.empty(strides[order[0]] * sizes[order[0]], dtype=torch.bfloat16)
    shape = tuple(sizes[letter] for letter in "BHNC")
    stride = tuple(strides[letter] for letter in "BHNC")
    caches = {
        f"layers.{i}": buffer.as_strided(shape, stride, i * strides["L"])
        for i in range(model.layers)
    }
    return PageLayout.of(caches, BLOCKS, tuple(caches), CHUNK_TOKENS // BLOCK_TOKENS)


def measure(model: Model, order: str, chunks: int, rounds: int) -> dict[str, Any]:
    layout, gpu = layout_of(model, order), NoGpu()
    slot_bytes = -(-layout.payload_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    slab = memoryview(mmap.mmap(-1, SLOTS * slot_bytes))
    places = ChunkPlaces({0: layout}, slab, slot_bytes, {0: 0})
    subject = GpuCopier(places, gpu, copier.Path.BATCH)  # type: ignore[arg-type]
    draw = random.Random(7)
    parts = [
        LoadPart(0, number % SLOTS, 0, tuple(draw.sample(range(BLOCKS), layout.blocks_per_chunk)))
        for number in range(chunks)
    ]
    found: dict[str, Any] = {"model": model.name, "order": order}
    for name, copy in (("save", subject.copy_out), ("load", subject.copy_in)):
        took_us = []
        for _ in range(rounds):
            mark = subject.mark()
            begin_s = thread_time()
            for part in parts:
                copy(part, mark).done()
            took_us.append(1e6 * (thread_time() - begin_s) / chunks)
        found[f"{name}_us"] = round(median(took_us), 1)
    found["descriptors"] = gpu.stream.descriptors
    subject.close()
    return found


@ends(600)
def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--chunks", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    result = {
        "command": f"python -m benchmarks.copy_launch --chunks {options.chunks} "
        f"--rounds {options.rounds}",
        "machine": machine(),
        "goals_us": {"Llama-3-8B": 20, "Llama-3-70B, TP 8": 60},
        "block_tokens": BLOCK_TOKENS,
        "chunk_tokens": CHUNK_TOKENS,
        "chunks": [
            measure(model, order, options.chunks, options.rounds)
            for model in MODELS[:2]
            for order in ORDERS
        ],
    }
    publish(result, options.out)
    return result


if __name__ == "__main__":
    main()
