"""KV cache events: what host memory and the bucket hold, in vLLM's words for routers.

Published by vLLM beside those of the GPU, when `--kv-events-config` asks for them. A chunk is
announced as the blocks it consists of, under the hashes and with the tokens that vLLM's own events
give, so whoever follows the one kind can follow the other. Media: "CPU" for host memory, "STORAGE"
for the bucket. The bucket belongs to the fleet: an engine announces what it has put there or
fetched, and takes it back when it finds it gone; what others do it does not see.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed import kv_events
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from s3kv.connectors.translate import GROUP, KVGeometry
from s3kv.planning.residency import Change, Origin, Residency
from s3kv.types import ChunkKey

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.request import Request

_CPU, _STORAGE = "CPU", "STORAGE"
_LOCALITY = {_CPU: "LOCAL", _STORAGE: "REMOTE"}
_FIELDS = {
    kind: set(kind.__struct_fields__) for kind in (kv_events.BlockStored, kv_events.BlockRemoved)
}
"""Later versions of vLLM know more of an event than earlier ones."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """What is announced of a chunk; kept while it is on its way or in host memory, because by then
    its request may be gone."""

    block_hashes: tuple[Any, ...]
    parent: Any
    token_ids: array[int]
    lora_id: int | None
    lora_name: str | None


class KVEvents:
    """Events of one engine, made of the entries of a `ResidencyLog`. The engine's thread."""

    def __init__(self, sizes: KVGeometry) -> None:
        self._sizes = sizes
        self._requests: dict[str, Request] = {}
        self._chunks: dict[ChunkKey, _Chunk] = {}
        self._events: list[KVCacheEvent] = []

    def add_request(self, request: Request) -> None:
        self._requests[request.request_id] = request

    def finished(self, request: Request) -> None:
        """Its tokens cannot be read any more after this."""
        self._requests.pop(request.request_id, None)

    def take(self) -> Iterable[KVCacheEvent]:
        """Since the last call, in the order in which it happened."""
        events, self._events = self._events, []
        return events

    def reset(self) -> None:
        """Nothing that was announced can be reached any more."""
        self._chunks.clear()
        self._events = [kv_events.AllBlocksCleared()]

    def take_in(self, entry: Origin | Change) -> None:
        if isinstance(entry, Origin):
            self._remember(entry)
        else:
            self._announce(entry)

    def _remember(self, origin: Origin) -> None:
        request = self._requests.get(origin.request_id)
        if request is None:
            return
        tokens, per_hash = self._sizes.chunk_tokens, self._sizes.hash_tokens
        start = origin.position * tokens
        first, end = start // per_hash, (start + tokens) // per_hash
        hashes = [
            maybe_convert_block_hash(h) for h in request.block_hashes[max(0, first - 1) : end]
        ]
        lora = request.lora_request
        self._chunks[origin.key] = _Chunk(
            block_hashes=tuple(hashes[first > 0 :]),
            parent=hashes[0] if first else None,
            token_ids=array("q", request.all_token_ids[start : start + tokens]),
            lora_id=None if lora is None else lora.adapter_id,
            lora_name=None if lora is None else lora.name,
        )

    def _announce(self, change: Change) -> None:
        # Without it: of before a reset.
        chunk = self._chunks.get(change.key)
        if chunk is None:
            return
        residency = change.residency
        if residency is Residency.HOST_STORED:
            self._stored(chunk, _CPU)
        elif residency is Residency.BUCKET_STORED:
            self._stored(chunk, _STORAGE)
        elif residency is Residency.HOST_REMOVED:
            self._removed(chunk, _CPU)
        elif residency is Residency.BUCKET_REMOVED:
            self._removed(chunk, _STORAGE)
        if residency in (Residency.HOST_REMOVED, Residency.NOTHING):
            del self._chunks[change.key]

    def _stored(self, chunk: _Chunk, medium: str) -> None:
        self._emit(
            kv_events.BlockStored,
            medium,
            block_hashes=list(chunk.block_hashes),
            parent_block_hash=chunk.parent,
            token_ids=list(chunk.token_ids),
            block_size=self._sizes.hash_tokens,
            lora_id=chunk.lora_id,
            lora_name=chunk.lora_name,
        )

    def _removed(self, chunk: _Chunk, medium: str) -> None:
        self._emit(kv_events.BlockRemoved, medium, block_hashes=list(chunk.block_hashes))

    def _emit(self, kind: Any, medium: str, **fields: Any) -> None:
        fields |= {"medium": medium, "group_idx": GROUP, "locality": _LOCALITY[medium]}
        known = _FIELDS[kind]
        self._events.append(kind(**{name: v for name, v in fields.items() if name in known}))
