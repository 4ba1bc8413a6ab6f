"""Spans for what a request has from the bucket and what the bucket has from it, through vLLM's own
OpenTelemetry set-up (`--otlp-traces-endpoint`), in the trace of the request.

    s3kv.wait    the engine asked for the prefix and was told to ask again, until it was answered
    s3kv.fetch   from the first of the request's chunks on its way to the last of them; a prefix
                 nothing is known of takes several, because the window grows with what arrives
    s3kv.upload  from the copy of the first chunk until the bucket has the last
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from s3kv.messages import JobKind
from s3kv.planning.residency import Change, Origin, Residency
from s3kv.types import ChunkKey

try:
    from vllm.tracing import extract_trace_context, instrument_manual
except ImportError:  # pragma: no cover - a vLLM that draws its spans in another way
    instrument_manual = None

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

_NAMES = {JobKind.FETCH: "s3kv.fetch", JobKind.SAVE: "s3kv.upload"}
_LAST = {
    JobKind.FETCH: {Residency.HOST_STORED, Residency.NOTHING},
    JobKind.SAVE: {Residency.BUCKET_STORED, Residency.HOST_ONLY, Residency.NOTHING},
}
"""What ends a chunk's way."""
_ARRIVED = (Residency.HOST_STORED, Residency.BUCKET_STORED)


def is_traced(vllm_config: VllmConfig) -> bool:
    """Whether vLLM was told where spans go."""
    observability = getattr(vllm_config, "observability_config", None)
    endpoint = getattr(observability, "otlp_traces_endpoint", None)
    return endpoint is not None and instrument_manual is not None


@dataclass(slots=True)
class _Burst:
    """Chunks of one request that are on their way together."""

    kind: JobKind
    request_id: str
    headers: Any
    started_ns: int
    chunks: int = 0
    arrived: int = 0
    left: set[ChunkKey] = field(default_factory=set)


class RequestSpans:
    """Spans of one engine. The engine's thread; the SDK sends them from a thread of its own.

    clock_ns: wall time, which is what spans carry.
    """

    def __init__(self, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self._clock_ns = clock_ns
        self._requests: dict[str, Any] = {}
        self._waits: dict[str, int] = {}
        self._bursts: dict[tuple[str, JobKind], _Burst] = {}
        self._burst_of: dict[ChunkKey, _Burst] = {}

    def add_request(self, request: Request) -> None:
        self._requests[request.request_id] = request.trace_headers

    def finished(self, request: Request) -> None:
        """Its uploads may go on; a wait does not."""
        self.answered(request.request_id, 0)
        self._requests.pop(request.request_id, None)

    def waits(self, request_id: str) -> None:
        if request_id not in self._waits:
            self._waits[request_id] = self._clock_ns()

    def answered(self, request_id: str, tokens: int) -> None:
        """tokens: offered by the answer."""
        started_ns = self._waits.pop(request_id, None)
        if started_ns is not None:
            headers = self._requests.get(request_id)
            self._draw("s3kv.wait", request_id, headers, started_ns, {"s3kv.tokens": tokens})

    def take_in(self, entry: Origin | Change) -> None:
        if isinstance(entry, Origin):
            self._begin(entry)
            return
        burst = self._burst_of.get(entry.key)
        if burst is not None and entry.residency in _LAST[burst.kind]:
            del self._burst_of[entry.key]
            burst.left.discard(entry.key)
            burst.arrived += entry.residency in _ARRIVED
            if not burst.left:
                self._end(burst)

    def _begin(self, origin: Origin) -> None:
        name = (origin.request_id, origin.kind)
        burst = self._bursts.get(name)
        if burst is None:
            headers = self._requests.get(origin.request_id)
            burst = _Burst(origin.kind, origin.request_id, headers, self._clock_ns())
            self._bursts[name] = burst
        burst.chunks += 1
        burst.left.add(origin.key)
        self._burst_of[origin.key] = burst

    def _end(self, burst: _Burst) -> None:
        del self._bursts[burst.request_id, burst.kind]
        counts = {"s3kv.chunks": burst.chunks, "s3kv.chunks_arrived": burst.arrived}
        name = _NAMES[burst.kind]
        self._draw(name, burst.request_id, burst.headers, burst.started_ns, counts)

    def _draw(
        self, name: str, request_id: str, headers: Any, started_ns: int, attributes: dict[str, int]
    ) -> None:
        instrument_manual(
            span_name=name,
            start_time=started_ns,
            end_time=self._clock_ns(),
            attributes={"gen_ai.request.id": request_id, **attributes},
            context=extract_trace_context(headers),
        )
