"""Observers of chunks and requests: the KV events and spans that vLLM publishes.

**KV events for routers** (`--kv-events-config`) are in vLLM's format, beside those that vLLM itself
publishes for the GPU: the chunks in host memory (medium "CPU") and in the bucket ("STORAGE"). A
chunk is announced as its blocks, with the hashes and tokens of vLLM's own events. A router has to
count announcements, because chunks may share their first blocks (docs/operating.md). An engine
announces the chunks that it has uploaded or fetched, and withdraws a chunk when it finds it gone.

**Spans** (`--otlp-traces-endpoint`) are in the trace of the request and go through vLLM's own
OpenTelemetry set-up:

    s3kv.wait    from the first lookup without an answer until a lookup answered
    s3kv.fetch   from the start of the first of the request's chunks until the end of the last; a
                 prefix of unknown length takes several spans
    s3kv.upload  from the copy of the first chunk until the bucket has the last
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed import kv_events
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from s3kv.connectors.kv_translate import KVGeometry
from s3kv.messages import JobKind
from s3kv.planning.residency import Change, Origin, Residency, ResidencyLog
from s3kv.types import ChunkKey

try:
    from vllm.tracing import extract_trace_context, instrument_manual
except ImportError:  # pragma: no cover - a vLLM that draws its spans in another way
    instrument_manual = None

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.request import Request


class Observers:
    """KV events, spans, both or neither, made from the `log` that the planner writes; None for
    neither. Used from the engine's thread. Call `read` after every hook in which the planner may
    have written.
    """

    def __init__(self, events: KVEvents | None = None, spans: RequestSpans | None = None) -> None:
        self._events = events
        self._spans = spans
        self._all = tuple(o for o in (events, spans) if o is not None)
        self.log = ResidencyLog() if self._all else None

    @classmethod
    def wanted(cls, vllm_config: VllmConfig, sizes: KVGeometry) -> Observers:
        """The observers that the engine's settings request."""
        events = vllm_config.kv_events_config
        publishes = events is not None and events.enable_kv_cache_events
        observability = getattr(vllm_config, "observability_config", None)
        endpoint = getattr(observability, "otlp_traces_endpoint", None)
        traces = endpoint is not None and instrument_manual is not None
        return cls(KVEvents(sizes) if publishes else None, RequestSpans() if traces else None)

    def add_request(self, request: Request) -> None:
        for observer in self._all:
            observer.add_request(request)

    def finished(self, request: Request) -> None:
        self.read()  # while the request's tokens can still be read
        for observer in self._all:
            observer.finished(request)

    def looked_up(self, request_id: str, *, waits: bool, tokens: int) -> None:
        if self._spans is not None:
            self._spans.looked_up(request_id, waits=waits, tokens=tokens)

    def read(self) -> None:
        for entry in self.log.take() if self.log is not None else ():
            for observer in self._all:
                observer.take_in(entry)

    def take_events(self) -> Iterable[KVCacheEvent]:
        return () if self._events is None else self._events.take()

    def reset(self) -> None:
        self.read()
        if self._events is not None:
            self._events.reset()


_CPU = {"medium": "CPU", "locality": "LOCAL"}
_STORAGE = {"medium": "STORAGE", "locality": "REMOTE"}
_EVENTS = {
    Residency.HOST_STORED: (kv_events.BlockStored, _CPU),
    Residency.HOST_REMOVED: (kv_events.BlockRemoved, _CPU),
    Residency.BUCKET_STORED: (kv_events.BlockStored, _STORAGE),
    Residency.BUCKET_REMOVED: (kv_events.BlockRemoved, _STORAGE),
}


class KVEvents:
    """The events of one engine, made from a `ResidencyLog`. Used from the engine's thread.

    They are of the first coverage only, in the name of its first group. It is the one
    with full attention, if there is one, and what a router should know is how far a prefix goes.
    """

    def __init__(self, sizes: KVGeometry) -> None:
        self._sizes = sizes
        self._requests: dict[str, Request] = {}
        self._chunks: dict[ChunkKey, dict[str, Any]] = {}
        """The content of each chunk that is in flight or in host memory, as the fields of its
        events: its request may end before them. The token ids are an array, for its size."""
        self._events: list[KVCacheEvent] = []

    def add_request(self, request: Request) -> None:
        self._requests[request.request_id] = request

    def finished(self, request: Request) -> None:
        """Forget the request, whose tokens cannot be read after this."""
        self._requests.pop(request.request_id, None)

    def take(self) -> Iterable[KVCacheEvent]:
        """The events since the last call, in the order they happened."""
        events, self._events = self._events, []
        return events

    def reset(self) -> None:
        """Announce that nothing announced before can be reached any more."""
        self._chunks.clear()
        self._events = [kv_events.AllBlocksCleared()]

    def take_in(self, entry: Origin | Change) -> None:
        if isinstance(entry, Origin):
            self._remember(entry)
        elif entry.key in self._chunks:  # otherwise it is from before a reset
            self._announce(self._chunks[entry.key], entry.residency)
            if entry.residency in (Residency.HOST_REMOVED, Residency.NOTHING):
                del self._chunks[entry.key]

    def _remember(self, origin: Origin) -> None:
        request = self._requests.get(origin.request_id)
        if request is None or origin.key.group != self._sizes.coverages[0].number:
            return
        tokens, per_hash = self._sizes.chunk_tokens, self._sizes.hash_tokens
        start = origin.position * tokens
        first, end = start // per_hash, (start + tokens) // per_hash
        hashes = [
            maybe_convert_block_hash(h) for h in request.block_hashes[max(0, first - 1) : end]
        ]
        lora = request.lora_request
        self._chunks[origin.key] = {
            "block_hashes": hashes[first > 0 :],
            "parent_block_hash": hashes[0] if first else None,
            "token_ids": array("q", request.all_token_ids[start : start + tokens]),
            "block_size": per_hash,
            "lora_id": None if lora is None else lora.adapter_id,
            "lora_name": None if lora is None else lora.name,
        }

    def _announce(self, chunk: dict[str, Any], residency: Residency) -> None:
        if residency not in _EVENTS:
            return
        kind, place = _EVENTS[residency]
        fields: dict[str, Any] = {"block_hashes": chunk["block_hashes"]}
        if kind is kv_events.BlockStored:
            fields = chunk | {"token_ids": list(chunk["token_ids"])}
        self._events.append(kind(**fields, **place, group_idx=self._sizes.coverages[0].members[0]))


_NAMES = {JobKind.FETCH: "s3kv.fetch", JobKind.SAVE: "s3kv.upload"}
_LAST = {
    JobKind.FETCH: {Residency.HOST_STORED, Residency.NOTHING},
    JobKind.SAVE: {Residency.BUCKET_STORED, Residency.HOST_ONLY, Residency.NOTHING},
}
"""The changes that end a fetch or an upload of a chunk."""
_ARRIVED = (Residency.HOST_STORED, Residency.BUCKET_STORED)


@dataclass(slots=True)
class _Burst:
    """Chunks of one request that are in flight at the same time: one span."""

    kind: JobKind
    request_id: str
    headers: Any
    started_ns: int
    chunks: int = 0
    arrived: int = 0
    left: set[ChunkKey] = field(default_factory=set)


class RequestSpans:
    """The spans of one engine. Used from the engine's thread; the SDK sends them from its own.

    clock_ns: wall-clock time, as spans have it.
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
        """End the request's wait. Its uploads may go on."""
        self.looked_up(request.request_id, waits=False, tokens=0)
        self._requests.pop(request.request_id, None)

    def looked_up(self, request_id: str, *, waits: bool, tokens: int) -> None:
        """Note the answer to a lookup. If it offers `tokens`, the request's wait ends."""
        if waits:
            if request_id not in self._waits:
                self._waits[request_id] = self._clock_ns()
        elif request_id in self._waits:
            started_ns, headers = self._waits.pop(request_id), self._requests.get(request_id)
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
