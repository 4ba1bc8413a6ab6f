"""The planner's changes as vLLM's events, and spans as an exporter gets them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from vllm.distributed import kv_events
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from s3kv.connectors.kv_translate import KVGeometry
from s3kv.connectors.observers import KVEvents, RequestSpans
from s3kv.messages import JobKind
from s3kv.planning.residency import Change, Origin, Residency
from s3kv.types import ChunkKey, Outcome
from tests.plans import fetches_of
from tests.unit.planning.desk import Desk

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
    stream, counts = KVEvents(KVGeometry(16, 16, 32)), Counter[tuple[str, Any]]()
    same, *ends = (block.ljust(32) for block in (b"same", b"one", b"other"))
    keys = [ChunkKey(0, end) for end in ends]
    for key in keys:
        subject = request(str(key.block_hash), block_hashes=[same, key.block_hash])
        stream.add_request(subject)
        stream.take_in(Origin(key, JobKind.SAVE, subject.request_id, 0))
        stream.take_in(Change(key, Residency.HOST_STORED))
    stream.take_in(Change(keys[0], Residency.HOST_REMOVED))
    counted(stream, counts)
    left = {("CPU", maybe_convert_block_hash(h)) for h in (same, ends[1])}
    assert {block for block, count in counts.items() if count} == left
    stream.take_in(Change(keys[1], Residency.HOST_REMOVED))
    counted(stream, counts)
    assert not any(counts.values())


def test_a_router_that_counts_forgets_a_chunk_that_the_bucket_has_lost() -> None:
    """However often the bucket has shown it before."""
    desk, sizes = Desk(slots=1), KVGeometry(16, 16, 32)
    stream, counts = KVEvents(sizes), Counter[tuple[str, Any]]()
    hashes = [block.ljust(32) for block in (b"first", b"second")]
    blocks = [("STORAGE", maybe_convert_block_hash(h)) for h in hashes]

    def follow() -> None:
        residency = desk.planner.ledger.residency
        assert residency is not None
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
    desk.add("r", "aaaa")
    desk.lookup("r")
    desk.end(fetches_of(desk.plan()), Outcome.MISSING)
    follow()
    assert not any(counts[block] for block in blocks)


TRACE_ID = 0x0AF7651916CD43DD8448EB211C80319C
HEADERS = {"traceparent": f"00-{TRACE_ID:032x}-b7ad6b7169203331-01"}
A, B = (ChunkKey(0, name.ljust(32)) for name in (b"a", b"b"))
REQUEST: Any = SimpleNamespace(request_id="r", trace_headers=HEADERS)


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    yield exporter
    provider.shutdown()


class Clock:
    now_ns = 0

    def __call__(self) -> int:
        self.now_ns += 1
        return self.now_ns


def ended(exporter: InMemorySpanExporter) -> list[tuple[str, int | None, int | None]]:
    return [(s.name, s.start_time, s.end_time) for s in exporter.get_finished_spans()]


def only(exporter: InMemorySpanExporter) -> ReadableSpan:
    (span,) = exporter.get_finished_spans()
    return span


def test_a_wait_lasts_until_the_answer(exporter: InMemorySpanExporter) -> None:
    spans = RequestSpans(Clock())
    spans.add_request(REQUEST)
    spans.looked_up("r", waits=True, tokens=0)
    spans.looked_up("r", waits=True, tokens=0)
    spans.looked_up("r", waits=False, tokens=256)
    spans.looked_up("r", waits=False, tokens=256)
    assert ended(exporter) == [("s3kv.wait", 1, 2)]
    span = only(exporter)
    assert span.attributes == {"gen_ai.request.id": "r", "s3kv.tokens": 256}
    assert span.parent is not None
    assert span.parent.trace_id == TRACE_ID, "in the trace the client began"


def test_who_goes_while_waiting_was_offered_nothing(exporter: InMemorySpanExporter) -> None:
    spans = RequestSpans(Clock())
    spans.add_request(REQUEST)
    spans.looked_up("r", waits=True, tokens=0)
    spans.finished(REQUEST)
    assert (only(exporter).attributes or {})["s3kv.tokens"] == 0


def test_chunks_on_their_way_together_are_one_fetch(exporter: InMemorySpanExporter) -> None:
    spans = RequestSpans(Clock())
    spans.add_request(REQUEST)
    spans.take_in(Origin(A, JobKind.FETCH, "r", 0))
    spans.take_in(Origin(B, JobKind.FETCH, "r", 1))
    spans.take_in(Change(A, Residency.HOST_STORED))
    spans.take_in(Change(A, Residency.BUCKET_STORED))
    assert ended(exporter) == []
    spans.take_in(Change(B, Residency.NOTHING))
    assert ended(exporter) == [("s3kv.fetch", 1, 2)]
    assert only(exporter).attributes == {
        "gen_ai.request.id": "r",
        "s3kv.chunks": 2,
        "s3kv.chunks_arrived": 1,
    }


@pytest.mark.parametrize(
    ("last", "arrived"),
    [(Residency.BUCKET_STORED, 1), (Residency.HOST_ONLY, 0), (Residency.NOTHING, 0)],
)
def test_an_upload_goes_on_after_its_request(
    exporter: InMemorySpanExporter, last: Residency, arrived: int
) -> None:
    spans = RequestSpans(Clock())
    spans.add_request(REQUEST)
    spans.take_in(Origin(A, JobKind.SAVE, "r", 0))
    spans.finished(REQUEST)
    spans.take_in(Change(A, Residency.HOST_STORED))
    assert ended(exporter) == []
    spans.take_in(Change(A, last))
    assert ended(exporter) == [("s3kv.upload", 1, 2)]
    span = only(exporter)
    assert (span.attributes or {})["s3kv.chunks_arrived"] == arrived
    assert span.parent is not None
    assert span.parent.trace_id == TRACE_ID


def test_what_nobody_asked_for_draws_nothing(exporter: InMemorySpanExporter) -> None:
    spans = RequestSpans(Clock())
    spans.take_in(Change(A, Residency.HOST_REMOVED))
    spans.looked_up("unknown", waits=False, tokens=0)
    assert ended(exporter) == []
