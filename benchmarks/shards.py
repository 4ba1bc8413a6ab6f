"""Chunks read by ranks of another tensor-parallel size: `python -m benchmarks.shards`.

Two tables for a model with 8 KV heads. The first is arithmetic: requests and MiB per chunk of an
8B model (32 MiB over all ranks) that a fleet of one size stores and one of another reads, for an
object per rank that its reader rearranges, and for objects whose payload is divided by heads, of
which a rank reads the header and its range. A chunk stored by the reader's own size is one GET
per rank; any other first takes one that ends in "not there".

The second is measured: the time of `Rearrangement.apply` for a rank's chunk of 16 blocks of 16
tokens in 32 layers, from the object of one rank at TP=1 or from those of a larger fleet, in ms and
as a share of what the same object takes to arrive at 90 MB/s, on one connection to S3. The time is
the median of --rounds. `--out FILE` writes both as JSON.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from benchmarks.deadline import ends
from benchmarks.rig import machine, publish
from s3kv.objects.codec import ChunkFormat
from s3kv.objects.rearranging import Pages, rearrangements
from s3kv.objects.shards import Shard, covers
from s3kv.place import Place
from s3kv.types import TensorSpec

HEADS, LAYERS, BLOCKS, TOKENS, CONTENT = 8, 32, 16, 16, 256
CHUNK_MIB = HEADS * LAYERS * BLOCKS * TOKENS * CONTENT * 2 / 2**20
SIZES = (1, 2, 4, 8)
CONNECTION_BYTES_PER_S = 90e6


def fleet(tp_size: int) -> list[Shard]:
    width = HEADS // tp_size
    layers = range(LAYERS)
    return [
        Shard(range(rank * width, (rank + 1) * width), HEADS, layers, LAYERS)
        for rank in range(tp_size)
    ]


def requests(writers: int, readers: int) -> dict[str, Any]:
    """Requests of all ranks per chunk, and MiB that they read of it."""
    own = writers == readers
    cover = max(1, writers // readers)
    rearranged = readers if own else readers * (1 + cover)
    ranged = readers * (1 if own else (3 if writers < readers else 1 + cover))
    return {
        "stored_at": writers,
        "read_at": readers,
        "puts": writers,
        "rearranged_gets": rearranged,
        "rearranged_mib": CHUNK_MIB * max(1, readers // writers),
        "ranged_gets": ranged,
        "ranged_mib": CHUNK_MIB,
        "per_head_puts": HEADS,
        "per_head_gets": HEADS,
    }


def form(shard: Shard, order: str) -> ChunkFormat:
    sizes = {"H": len(shard.heads), "N": TOKENS, "C": CONTENT}
    named = "HNC" if sizes["H"] == 1 else order
    page = tuple(sizes[dimension] for dimension in named)
    layers = tuple(TensorSpec(f"layers.{n}", "BF16", page, (), named) for n in range(LAYERS))
    part = TensorSpec.of_layers("g0", BLOCKS, layers)
    return ChunkFormat("0" * 32, (part,), 0, shard.name)


def measure(writers: int, readers: int, order: str, rounds: int) -> dict[str, Any]:
    wanted, stored = fleet(readers)[-1], fleet(writers)
    own = form(wanted, order)
    (cover,) = covers(wanted, stored)
    found = rearrangements(own, wanted, cover, Pages(order))
    assert found is not None
    target = Place.of(bytearray(own.object_bytes), own.header_bytes)
    formats = [part.format for part in found]
    sources = [Place.of(bytearray(it.object_bytes), it.header_bytes) for it in formats]
    took: list[float] = []
    for _ in range(rounds):
        begin_s = perf_counter()
        for part, source in zip(found, sources, strict=True):
            part.apply(source, target)
        took.append(perf_counter() - begin_s)
    arrives_s = max(source.nbytes for source in sources) / CONNECTION_BYTES_PER_S
    return {
        "stored_at": writers,
        "read_at": readers,
        "order": order,
        "mib": round(own.payload_bytes / 2**20, 1),
        "ms": round(1000 * median(took), 2),
        "of_arrival": round(median(took) / arrives_s, 3),
    }


@ends(600)
def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    pairs = [(w, r) for w in SIZES for r in SIZES]
    result = {
        "command": f"python -m benchmarks.shards --rounds {options.rounds}",
        "machine": machine(),
        "chunk_mib": CHUNK_MIB,
        "requests": [requests(*pair) for pair in pairs],
        "copies": [
            measure(*pair, order, options.rounds)
            for pair in ((1, 2), (1, 8), (2, 1), (4, 2), (8, 1), (2, 8))
            for order in ("HNC", "NHC")
        ],
    }
    publish(result, options.out)
    return result


if __name__ == "__main__":
    main()
