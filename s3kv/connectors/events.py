"""KV events: the chunks in host memory and in the bucket, published for routers.

They are in vLLM's format (`--kv-events-config`), beside those that vLLM itself publishes for the
GPU: medium "CPU" for host memory, "STORAGE" for the bucket. A chunk is announced as its blocks,
with the hashes and tokens of vLLM's own events. A router has to count announcements, because chunks
may share their first blocks (docs/operating.md). An engine announces the chunks that it has
uploaded or fetched, and withdraws a chunk when it finds it gone.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm.distributed import kv_events
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from s3kv.connectors.kv_translate import KVGeometry
from s3kv.planning.residency import Change, Origin, Residency, ResidencyLog
from s3kv.types import ChunkKey

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.request import Request

_CPU = {"medium": "CPU", "locality": "LOCAL"}
_STORAGE = {"medium": "STORAGE", "locality": "REMOTE"}
_EVENTS = {
    Residency.HOST_STORED: (kv_events.BlockStored, _CPU),
    Residency.HOST_REMOVED: (kv_events.BlockRemoved, _CPU),
    Residency.BUCKET_STORED: (kv_events.BlockStored, _STORAGE),
    Residency.BUCKET_REMOVED: (kv_events.BlockRemoved, _STORAGE),
}


class KVEvents:
    """The events of one engine, made from the `log` that the planner writes. Used from the engine's
    thread. Call `read` after every hook in which the planner may have written.

    Events cover only the first coverage, under the name of its first group. That is the one with
    full attention, if there is one: a router needs only the length of the prefix.

    is_published: whether vLLM publishes events. Otherwise `log` is None, and nothing is kept.
    """

    def __init__(self, sizes: KVGeometry, *, is_published: bool = True) -> None:
        self.log = ResidencyLog() if is_published else None
        self._sizes = sizes
        self._requests: dict[str, Request] = {}
        self._chunks: dict[ChunkKey, dict[str, Any]] = {}
        """The event fields of each chunk that is in flight or in host memory, because its request
        may end before its events. The token ids are an array, to save memory."""
        self._events: list[KVCacheEvent] = []

    def add_request(self, request: Request) -> None:
        if self.log is not None:
            self._requests[request.request_id] = request

    def finished(self, request: Request) -> None:
        """Forget the request, whose tokens cannot be read after this."""
        self.read()
        self._requests.pop(request.request_id, None)

    def read(self) -> None:
        for entry in self.log.take() if self.log is not None else ():
            self.take_in(entry)

    def take(self) -> Iterable[KVCacheEvent]:
        """The events since the last call, in the order they happened."""
        events, self._events = self._events, []
        return events

    def reset(self) -> None:
        """Announce that everything announced before is unreachable."""
        self.read()
        self._chunks.clear()
        self._events = [] if self.log is None else [kv_events.AllBlocksCleared()]

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
