"""Who is told what becomes of chunks and requests, where vLLM was asked to publish it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from s3kv.connectors.events import KVEvents
from s3kv.connectors.traces import RequestSpans, is_traced
from s3kv.connectors.translate import KVGeometry
from s3kv.planning.residency import ResidencyLog

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.request import Request


class Observers:
    """KV events, spans, or both, fed from one `log`, which the planner writes. The engine's
    thread; `read` after every hook in which the planner may have written.
    """

    def __init__(self, events: KVEvents | None, spans: RequestSpans | None) -> None:
        self.log = ResidencyLog()
        self._events = events
        self._spans = spans
        self._all = tuple(o for o in (events, spans) if o is not None)

    @classmethod
    def wanted(cls, vllm_config: VllmConfig, sizes: KVGeometry) -> Observers | None:
        """Those this engine was configured for; None when nobody wants to know anything."""
        config = vllm_config.kv_events_config
        publishes = config is not None and config.enable_kv_cache_events
        events = KVEvents(sizes) if publishes else None
        spans = RequestSpans() if is_traced(vllm_config) else None
        return None if events is None and spans is None else cls(events, spans)

    def add_request(self, request: Request) -> None:
        for observer in self._all:
            observer.add_request(request)

    def finished(self, request: Request) -> None:
        self.read()  # while the request can still be asked for its tokens
        for observer in self._all:
            observer.finished(request)

    def looked_up(self, request_id: str, *, waits: bool, tokens: int) -> None:
        if self._spans is None:
            return
        if waits:
            self._spans.waits(request_id)
        else:
            self._spans.answered(request_id, tokens)

    def read(self) -> None:
        for entry in self.log.take():
            for observer in self._all:
                observer.take_in(entry)

    def take_events(self) -> Iterable[KVCacheEvent]:
        return () if self._events is None else self._events.take()

    def reset(self) -> None:
        self.read()
        if self._events is not None:
            self._events.reset()
