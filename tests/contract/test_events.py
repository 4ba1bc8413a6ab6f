"""The planner's changes as vLLM's events."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed import kv_events
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from s3kv.connectors import events
from s3kv.connectors.events import KVEvents
from s3kv.connectors.translate import KVGeometry
from s3kv.messages import JobKind
from s3kv.planning.residency import Change, Origin, Residency
from s3kv.types import ChunkKey

SECOND = ChunkKey(0, b"second chunk".ljust(32))


def request(name: str = "r", **attributes: Any) -> Any:
    hashes = [f"{name}-{block}".encode().ljust(32) for block in range(4)]
    known = {"request_id": name, "block_hashes": hashes, "all_token_ids": list(range(70))}
    return SimpleNamespace(**known | {"lora_request": None} | attributes)


def published(subject: Any, *residencies: Residency) -> list[Any]:
    """What becomes of the second chunk (blocks 2 and 3) of a request."""
    stream = KVEvents(KVGeometry(16, 16, 32))
    stream.add_request(subject)
    stream.take_in(Origin(SECOND, JobKind.SAVE, subject.request_id, 1))
    stream.finished(subject)
    for residency in residencies:
        stream.take_in(Change(SECOND, residency))
    return list(stream.take())


def test_a_chunk_is_announced_as_its_blocks() -> None:
    subject = request()
    stored, to_bucket = published(subject, Residency.HOST_STORED, Residency.BUCKET_STORED)
    assert isinstance(stored, BlockStored)
    hashes = [maybe_convert_block_hash(h) for h in subject.block_hashes]
    assert stored.block_hashes == hashes[2:]
    assert stored.parent_block_hash == hashes[1]
    assert stored.token_ids == list(range(32, 64))
    assert (stored.block_size, stored.group_idx) == (16, 0)
    assert (stored.medium, stored.locality) == (kv_events.MEDIUM_CPU, "LOCAL")
    assert (stored.lora_id, stored.lora_name) == (None, None)
    assert (to_bucket.medium, to_bucket.locality) == (kv_events.MEDIUM_STORAGE, "REMOTE")
    assert to_bucket.block_hashes == hashes[2:]


def test_the_first_chunk_has_no_parent() -> None:
    stream = KVEvents(KVGeometry(16, 16, 32))
    stream.add_request(request())
    stream.take_in(Origin(SECOND, JobKind.FETCH, "r", 0))
    stream.take_in(Change(SECOND, Residency.HOST_STORED))
    (stored,) = stream.take()
    assert isinstance(stored, BlockStored)
    assert stored.parent_block_hash is None
    assert len(stored.block_hashes) == 2
    assert stored.token_ids == list(range(32))
    assert list(stream.take()) == []


def test_an_adapter_is_named() -> None:
    adapter = SimpleNamespace(adapter_id=7, name="french")
    (stored,) = published(request(lora_request=adapter), Residency.HOST_STORED)
    assert (stored.lora_id, stored.lora_name) == (7, "french")


def test_what_leaves_is_taken_back_once() -> None:
    removals = published(
        request(), Residency.HOST_STORED, Residency.HOST_REMOVED, Residency.HOST_REMOVED
    )[1:]
    assert [(type(e), e.medium) for e in removals] == [(BlockRemoved, "CPU")]


def test_what_comes_to_nothing_is_forgotten() -> None:
    gone, *others = published(
        request(), Residency.BUCKET_REMOVED, Residency.NOTHING, Residency.HOST_STORED
    )
    assert (type(gone), gone.medium) == (BlockRemoved, "STORAGE")
    assert others == []


def test_a_reset_clears_everything_and_nothing_of_before_is_told_of_later() -> None:
    stream = KVEvents(KVGeometry(16, 16, 32))
    stream.add_request(request())
    stream.take_in(Origin(SECOND, JobKind.SAVE, "r", 1))
    stream.take_in(Change(SECOND, Residency.HOST_STORED))
    stream.reset()
    stream.take_in(Change(SECOND, Residency.HOST_REMOVED))
    (only,) = stream.take()
    assert isinstance(only, AllBlocksCleared)


def test_fields_that_this_vllm_does_not_know_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    older = events._FIELDS[BlockStored] - {"locality", "group_idx"}
    monkeypatch.setitem(events._FIELDS, BlockStored, older)
    (stored,) = published(request(), Residency.HOST_STORED)
    assert stored.locality is None
    assert stored.group_idx is None
