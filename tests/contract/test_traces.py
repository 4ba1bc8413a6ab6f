"""Spans, as an exporter gets them."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from s3kv.connectors.traces import RequestSpans
from s3kv.messages import JobKind
from s3kv.planning.residency import Change, Origin, Residency
from s3kv.types import ChunkKey

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
    spans.waits("r")
    spans.waits("r")
    spans.answered("r", 256)
    spans.answered("r", 256)
    assert ended(exporter) == [("s3kv.wait", 1, 2)]
    span = only(exporter)
    assert span.attributes == {"gen_ai.request.id": "r", "s3kv.tokens": 256}
    assert span.parent is not None
    assert span.parent.trace_id == TRACE_ID, "in the trace the client began"


def test_who_goes_while_waiting_was_offered_nothing(exporter: InMemorySpanExporter) -> None:
    spans = RequestSpans(Clock())
    spans.add_request(REQUEST)
    spans.waits("r")
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
    spans.answered("unknown", 0)
    assert ended(exporter) == []
