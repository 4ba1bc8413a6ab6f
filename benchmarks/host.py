"""What the books of host memory cost: `python -m benchmarks.host [slots]`.

Times are the least of several rounds in ns per item, on one core, without the engine beside it.
Bytes are what a full table holds per resident chunk, beside the
block hash itself.
"""

from __future__ import annotations

import json
import platform
import random
import sys
import tracemalloc
from collections import deque
from collections.abc import Callable
from time import perf_counter_ns

from benchmarks.deadline import ends
from s3kv.host.room import EqualSlots
from s3kv.host.table import Table
from s3kv.types import ChunkKey

CHAIN_CHUNKS = 1024
ROUNDS = 9


def block_hashes(count: int, *, seed: int) -> list[bytes]:
    rng = random.Random(seed)
    return [rng.randbytes(32) for _ in range(count)]


def fill(table: Table, hashes: list[bytes]) -> None:
    for block_hash in hashes:
        reservation = table.reserve(ChunkKey(0, block_hash))
        assert reservation is not None
        table.commit(reservation.entry, dirty=False)


def least_ns(work: Callable[[], object], items: int) -> float:
    rounds = []
    for _ in range(ROUNDS):
        start = perf_counter_ns()
        work()
        rounds.append(perf_counter_ns() - start)
    return round(min(rounds) / items, 1)


def measure(count: int) -> dict[str, float]:
    evicted, hashes = block_hashes(count, seed=1), block_hashes(count, seed=2)
    tracemalloc.start()
    table = Table(EqualSlots(count))
    fill(table, evicted)
    fill(table, hashes)
    nbytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    # A prompt brings hashes equal to the table's, not the same objects.
    chain = [bytes(bytearray(block_hash)) for block_hash in hashes[:CHAIN_CHUNKS]]
    slots = table.pin_prefix(0, chain)
    assert len(slots) == CHAIN_CHUNKS
    keys = [ChunkKey(0, block_hash) for block_hash in chain]
    result = {
        "lookup_ns": least_ns(lambda: [table.lookup(key) for key in keys], CHAIN_CHUNKS),
        "pin_prefix_ns": least_ns(lambda: table.pin_prefix(0, chain), CHAIN_CHUNKS),
        "touch_chain_ns": least_ns(lambda: table.touch_chain(slots), CHAIN_CHUNKS),
        "pin_ns": least_ns(lambda: deque(map(table.pin, slots), 0), CHAIN_CHUNKS),
        "unpin_ns": least_ns(lambda: deque(map(table.unpin, slots), 0), CHAIN_CHUNKS),
        "bytes_per_chunk": round(nbytes / count, 1),
    }
    for slot in slots:
        while slot.pins:
            table.unpin(slot)
    result |= evictions(table, count)
    table.check()
    return result


def evictions(table: Table, count: int) -> dict[str, float]:
    """A reservation that evicts, and its commit: two tables full of new keys, none ever used."""
    times = []
    for seed in (3, 4):
        for start in range(0, count, CHAIN_CHUNKS):
            new = block_hashes(min(CHAIN_CHUNKS, count - start), seed=seed * count + start)
            before = perf_counter_ns()
            fill(table, new)
            times.append((perf_counter_ns() - before) / len(new))
    times.sort()
    return {
        "evict_reserve_commit_ns": round(times[len(times) // 2], 1),
        "evict_reserve_commit_worst_batch_ns": round(times[-1], 1),
    }


@ends(600)
def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    report = {
        "python": platform.python_version(),
        "slots": count,
        "chain_chunks": CHAIN_CHUNKS,
        "measured": measure(count),
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
