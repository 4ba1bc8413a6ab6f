"""The planner's changes as vLLM's events."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed import kv_events
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from s3kv.connectors.events import KVEvents
from s3kv.planning.residency import Change, Origin, Residency
from s3kv.types import ChunkKey, Outcome
from tests.contract.configurations import SIZES
from tests.plans import fetches_of
from tests.unit.planning.desk import Desk

SECOND = ChunkKey(0, b"second chunk".ljust(32))


def request(name: str = "r", **attributes: Any) -> Any:
    hashes = [f"{name}-{block}".encode().ljust(32) for block in range(4)]
    known = {"request_id": name, "block_hashes": hashes, "all_token_ids": list(range(70))}
    return SimpleNamespace(**known | {"lora_request": None} | attributes)


def take_in(stream: KVEvents, subject: Any, key: ChunkKey, position: int, *new: Residency) -> None:
    """A chunk of a request that ends before what becomes of the chunk."""
    stream.add_request(subject)
    stream.take_in(Origin(key, subject.request_id, position))
    stream.finished(subject)
    for residency in new:
        stream.take_in(Change(key, residency))


def published(subject: Any, *residencies: Residency, position: int = 1) -> list[Any]:
    stream = KVEvents(SIZES)
    take_in(stream, subject, SECOND, position, *residencies)
    found = list(stream.take())
    assert list(stream.take()) == []
    return found


def test_a_chunk_is_announced_as_its_blocks() -> None:
    subject = request()
    stored, to_bucket = published(subject, Residency.HOST_STORED, Residency.BUCKET_STORED)
    hashes = [maybe_convert_block_hash(h) for h in subject.block_hashes]
    assert stored == BlockStored(
        block_hashes=hashes[2:],
        parent_block_hash=hashes[1],
        token_ids=list(range(32, 64)),
        block_size=16,
        lora_id=None,
        lora_name=None,
        medium=kv_events.MEDIUM_CPU,
        locality="LOCAL",
        group_idx=0,
    )
    assert (to_bucket.medium, to_bucket.locality) == (kv_events.MEDIUM_STORAGE, "REMOTE")
    assert to_bucket.block_hashes == hashes[2:]
    adapter = SimpleNamespace(adapter_id=7, name="french")
    adapted = request(lora_request=adapter)
    (first,) = published(adapted, Residency.HOST_STORED, position=0)
    assert (first.parent_block_hash, first.token_ids) == (None, list(range(32)))
    assert (first.lora_id, first.lora_name) == (7, "french")


@pytest.mark.parametrize(
    ("residencies", "events"),
    [
        ("HOST_STORED HOST_REMOVED HOST_REMOVED", [(BlockStored, "CPU"), (BlockRemoved, "CPU")]),
        ("BUCKET_REMOVED NOTHING HOST_STORED", [(BlockRemoved, "STORAGE")]),
    ],
    ids=["gone", "never there"],
)
def test_a_chunk_that_leaves_is_withdrawn_once(residencies: str, events: Any) -> None:
    new = (Residency[name] for name in residencies.split())
    assert [(type(e), e.medium) for e in published(request(), *new)] == events


def test_a_reset_clears_everything_announced_before() -> None:
    stream = KVEvents(SIZES)
    take_in(stream, request(), SECOND, 1, Residency.HOST_STORED)
    stream.reset()
    stream.take_in(Change(SECOND, Residency.HOST_REMOVED))
    (only,) = stream.take()
    assert isinstance(only, AllBlocksCleared)


def counted(stream: KVEvents, counts: Counter[tuple[str, Any]]) -> None:
    """Follow events as vLLM's OffloadingConnector asks it of a router, and Dynamo and llm-d do: a
    block is held until it was withdrawn as often as it was announced."""
    for event in stream.take():
        assert isinstance(event, BlockStored | BlockRemoved)
        change = 1 if isinstance(event, BlockStored) else -1
        for block in event.block_hashes:
            counts[str(event.medium), block] = max(0, counts[str(event.medium), block] + change)


def test_a_router_that_counts_keeps_the_blocks_of_a_chunk_beside_one_that_leaves() -> None:
    """Prompts that part within a chunk have two chunks with the same first blocks."""
    stream, counts = KVEvents(SIZES), Counter[tuple[str, Any]]()
    same, *ends = (block.ljust(32) for block in (b"same", b"one", b"other"))
    keys = [ChunkKey(0, end) for end in ends]
    for key in keys:
        subject = request(str(key.block_hash), block_hashes=[same, key.block_hash])
        take_in(stream, subject, key, 0, Residency.HOST_STORED)
    stream.take_in(Change(keys[0], Residency.HOST_REMOVED))
    counted(stream, counts)
    left = {("CPU", maybe_convert_block_hash(h)) for h in (same, ends[1])}
    assert {block for block, count in counts.items() if count} == left
    stream.take_in(Change(keys[1], Residency.HOST_REMOVED))
    counted(stream, counts)
    assert not any(counts.values())


def test_a_router_that_counts_forgets_a_chunk_that_the_bucket_has_lost() -> None:
    """However often the bucket has shown it before."""
    desk, stream, counts = Desk(slots=1), KVEvents(SIZES), Counter[tuple[str, Any]]()
    hashes = [block.ljust(32) for block in (b"first", b"second")]
    blocks = [("STORAGE", maybe_convert_block_hash(h)) for h in hashes]

    def follow() -> None:
        residency = desk.planner.ledger.residency
        for entry in residency.take():
            stream.take_in(entry)
        counted(stream, counts)

    for name in ("for aaaa", "r"):
        stream.add_request(request(name, block_hashes=hashes))
    for _ in range(3):
        desk.make_resident("aaaa")
        follow()
        assert all(counts[block] for block in blocks)
        desk.make_resident("bbbb")  # evicts it
    desk.ask("r", "aaaa")
    desk.end(fetches_of(desk.plan()), Outcome.MISSING)
    follow()
    assert not any(counts[block] for block in blocks)
