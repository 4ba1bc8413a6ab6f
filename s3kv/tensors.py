"""Plain tensors by the hash of their content: host memory and bucket, without vLLM.

    rows = TensorRows((1408,), torch.bfloat16)
    async with await TensorStore.open(config, rows, namespace={"model": "my-encoder"}) as store:
        await store.put(content_hash, embeddings)  # [any number, 1408]
        embeddings = await store.get(content_hash)

For what an encoder makes of images and clips: tensors that share the shape of a row and differ in
how many rows they have. The same item table, object format and I/O process as under the EC
connector. Whoever asks by hash does not know the number of rows. So the object holds the tensor as
one long row, whose length follows from the object's, and every byte of the header is still known
before it is compared.

For the same reason an object is fetched to a *berth*, a place as large as the largest item, and
copied from there to one of its own size. Places of unknown size in the table itself would push out
as much as the largest item for each small one.

    absent ──put: copied to its place──────────────────▶ resident, pinned until uploaded
       └────get: fetched to a berth, verified, copied──▶ resident ──evicted──▶ absent
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

import torch

from s3kv.config import Config
from s3kv.device.tensors import TensorRows, dtype_name
from s3kv.errors import ConfigError
from s3kv.host.extents import order_of
from s3kv.host.items import PAGE_BYTES, Item, ItemTable
from s3kv.host.slab import Slab
from s3kv.io.client import IoClient
from s3kv.io.complaints import Complaints
from s3kv.io.wire import Done, Hello
from s3kv.objects.integrity import Integrity
from s3kv.objects.items import GROUP, HEADER_BYTES, SHARD
from s3kv.objects.keys import MAX_HASH_BYTES, Namespace, canonical_json, fingerprint_digest
from s3kv.planning.breaker import Breaker
from s3kv.planning.index import BucketIndex
from s3kv.pump import Pump, started
from s3kv.types import ChunkKey, ItemShape, Location, Outcome, Span

__all__ = ["TensorRows", "TensorStore"]

_BERTHS_MAX = 8
_BERTHS_SHARE = 4
"""Berths take one part in so many of the memory, but there is always one."""
_INDEX_ITEMS = 500_000
_BREAKER_FAILURES = 5


@dataclass(slots=True, eq=False)
class _Flight:
    """A tensor on its way to its place. readers: how many will find it pinned for them."""

    landed: asyncio.Future[Item | None]
    readers: int = 0


class TensorStore:
    """Made by `open`, ended by `close`. All methods are for the loop that opened it."""

    def __init__(
        self,
        config: Config,
        rows: TensorRows,
        table: ItemTable,
        berths: list[Span],
        slab: Slab,
        client: IoClient,
    ) -> None:
        self._config = config
        self._rows = rows
        self._table = table
        self._slab = slab
        self._client = client
        self._pump = Pump(client, slab, self._on_done, lambda: bool(self._on_end))
        self._index = BucketIndex(capacity=_INDEX_ITEMS, miss_ttl_s=config.miss_ttl_s)
        self._breaker = Breaker(threshold=_BREAKER_FAILURES)
        self._complaints = Complaints(time.monotonic)
        self._counters: Counter[str] = Counter()
        self._flights: dict[ChunkKey, _Flight] = {}
        self._uploads: set[ChunkKey] = set()
        self._on_end: dict[int, Callable[[Done], None]] = {}
        self._jobs = 0
        self._berths: asyncio.Queue[Span] = asyncio.Queue()
        for berth in berths:
            self._berths.put_nowait(berth)

    @classmethod
    async def open(
        cls, config: Config, rows: TensorRows, *, namespace: Mapping[str, Any]
    ) -> TensorStore:
        """Start on a bucket. Of the memory settings only `max_item_bytes` counts here.

        namespace: plain values that say what the tensors mean (model, revision, …); two stores
            see each other's when these, the row's shape, the dtype and the prefix are equal.
        Raises `ConfigError`, or a `StoreError` when the bucket cannot be used.
        """
        table, berths = _divided(config, rows)
        integrity = Integrity.of(config)
        identity = {
            "namespace": dict(namespace),
            "row": {"dtype": dtype_name(rows.dtype), "shape": list(rows.shape)},
            "integrity": integrity.identity(),
        }
        place = Namespace(config.prefix, fingerprint_digest(identity))
        hello = Hello(
            config,
            place.prefix,
            place.digest,
            SHARD,
            {},
            item_dtype=dtype_name(rows.dtype),
            integrity=integrity,
            manifest=canonical_json(identity),
        )
        slab = Slab.create(rows.host_bytes, huge_pages=config.huge_pages)
        return cls(config, rows, table, berths, slab, await started(hello, slab))

    async def __aenter__(self) -> TensorStore:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def put(self, content_hash: bytes, tensor: torch.Tensor) -> bool:
        """Keep the tensor in host memory, and in the background in the bucket.

        It may be on any device; it is read before this returns and is the caller's again then.
        An upload that fails is counted and told in the log, and tried again only by another `put`;
        until then the tensor is in host memory alone, and may leave it. After `flush`, `where` says
        whether the bucket has it.
        False when nothing was kept: the tensor is larger than `max_item_bytes`, or memory is full
        of tensors the bucket has not answered for yet. Raises `ValueError` for a tensor that the
        store was not opened for.
        """
        self._rows.check(tensor)
        return await self._pump.whole(self._put(_key(content_hash), tensor))

    async def get(
        self, content_hash: bytes, device: str | torch.device | None = None
    ) -> torch.Tensor | None:
        """The tensor, from host memory or the bucket, as a new one that is the caller's. None on a
        miss: also when its object is damaged, late or larger than `max_item_bytes`.

        device: where to make it; None for host memory.
        """
        where = torch.device("cpu" if device is None else device)
        return await self._pump.whole(self._get(_key(content_hash), where))

    def where(self, content_hash: bytes) -> Location:
        """Which tiers hold the tensor, as far as is known without asking."""
        key = _key(content_hash)
        item = self._table.lookup(key)
        bucket = self._index.verdict(key, time.monotonic())
        return Location(device=False, host=item is not None and item.resident, bucket=bucket)

    @property
    def counters(self) -> Mapping[str, int]:
        """What has happened so far, in the words of the metrics."""
        self._counters["evictions"] = self._table.evictions
        return self._counters

    async def flush(self) -> None:
        """Wait until the bucket has answered for everything put so far."""
        while self._uploads:
            await self._pump.next_end()

    async def close(self) -> None:
        """As `TieredStore.close`."""
        await self._pump.close(self._config.drain_timeout_s)

    # --- inside ----------------------------------------------------------------------------

    async def _put(self, key: ChunkKey, tensor: torch.Tensor) -> bool:
        while (flight := self._flights.get(key)) is not None:
            await flight.landed
        item = self._table.lookup(key)
        if item is None:
            flight = self._take_off(key, readers=0)
            try:
                item = await self._keep(key, tensor)
            finally:
                self._land(key, flight, item)
        if item is None:
            return False
        if key not in self._uploads and not self._index.is_present(key):
            self._upload(item)
        return True

    async def _keep(self, key: ChunkKey, tensor: torch.Tensor) -> Item | None:
        nbytes = HEADER_BYTES + len(tensor) * self._rows.row_bytes
        if nbytes > self._config.max_item_bytes:
            self._counters["items_too_large"] += 1
            return None
        item = self._table.reserve(key, nbytes)
        if item is None:
            self._counters["saves_dropped"] += 1
            return None
        self._counters["saves"] += 1
        await self._fill(item, lambda: self._tensor_at(item).copy_(tensor.detach()))
        return item

    async def _get(self, key: ChunkKey, device: torch.device) -> torch.Tensor | None:
        item = await self._pinned(key)
        if item is None:
            return None
        try:
            return await asyncio.to_thread(self._tensor_at(item).to, device, copy=True)
        finally:
            self._table.unpin(item)

    async def _pinned(self, key: ChunkKey) -> Item | None:
        """The item, pinned for the caller, who unpins it."""
        flight = self._flights.get(key)
        if flight is not None:
            flight.readers += 1
            return await flight.landed
        item = self._table.lookup(key)
        if item is not None:
            self._counters["hits"] += 1
            self._table.pin(item)
            return item
        flight = self._take_off(key, readers=1)
        try:
            item = await self._fetch(key)
        finally:
            self._land(key, flight, item)
        return item

    def _take_off(self, key: ChunkKey, readers: int) -> _Flight:
        flight = _Flight(asyncio.get_running_loop().create_future(), readers)
        self._flights[key] = flight
        return flight

    def _land(self, key: ChunkKey, flight: _Flight, item: Item | None) -> None:
        """In one go with the item's commit, so that no reader finds it evicted."""
        del self._flights[key]
        if item is not None:
            for _ in range(flight.readers):
                self._table.pin(item)
        flight.landed.set_result(item)

    async def _fetch(self, key: ChunkKey) -> Item | None:
        berth = await self._berths.get()
        try:
            now_s = time.monotonic()
            if self._index.is_absent(key, now_s):
                self._counters["fetches_spared"] += 1
                return None
            if not self._breaker.allows(now_s):
                self._counters["fetches_refused_by_breaker"] += 1
                return None
            self._counters["fetches"] += 1
            arrived: asyncio.Future[Done] = asyncio.get_running_loop().create_future()
            shape = ItemShape(1, berth.nbytes)
            self._client.fetch(self._job(arrived.set_result), key, berth.offset, shape)
            self._pump.wake()
            nbytes = self._fetched(key, await arrived)
            return None if nbytes is None else await self._bring_in(key, berth, nbytes)
        finally:
            self._berths.put_nowait(berth)

    def _fetched(self, key: ChunkKey, done: Done) -> int | None:
        """The object's length; None when it is a miss."""
        now_s = time.monotonic()
        self._counters[f"fetch_{done.outcome.name.lower()}"] += 1
        if done.reason:
            self._counters[f"fetch_corrupt_{done.reason}"] += 1
        self._complaints.note("fetch", done.outcome, done.detail)
        self._breaker.saw(done.outcome, now_s)
        if done.outcome in (Outcome.MISSING, Outcome.CORRUPT):
            self._index.note_absent(key, now_s)
        if not done.outcome.is_success:
            return None
        if (done.nbytes - HEADER_BYTES) % self._rows.row_bytes:
            # Sealed as it should be, and not by a store: no store of this namespace writes it.
            self._counters["fetch_corrupt_rows"] += 1
            self._index.note_absent(key, now_s)
            return None
        self._counters["fetch_bytes"] += done.nbytes
        self._index.note_present(key)
        return done.nbytes

    async def _bring_in(self, key: ChunkKey, berth: Span, nbytes: int) -> Item | None:
        item = self._table.reserve(key, nbytes)
        if item is None:
            self._counters["fetches_without_room"] += 1
            return None
        source = self._bytes_at(Span(berth.offset, nbytes))
        await self._fill(item, lambda: self._bytes_at(item.span).copy_(source))
        return item

    async def _fill(self, item: Item, copy: Callable[[], object]) -> None:
        try:
            await asyncio.to_thread(copy)
        except BaseException:
            self._table.abandon(item)
            raise
        self._table.commit(item)

    def _upload(self, item: Item) -> None:
        self._table.pin(item)
        self._uploads.add(item.key)
        job_id = self._job(partial(self._uploaded, item))
        self._client.upload(job_id, item.key, item.span.offset, ItemShape(1, item.nbytes))
        self._pump.wake()

    def _uploaded(self, item: Item, done: Done) -> None:
        self._counters[f"upload_{done.outcome.name.lower()}"] += 1
        self._complaints.note("upload", done.outcome, done.detail)
        self._table.unpin(item)
        self._uploads.discard(item.key)
        if done.outcome.is_success:
            self._counters["upload_bytes"] += done.nbytes
            self._index.note_present(item.key)

    def _job(self, on_end: Callable[[Done], None]) -> int:
        self._jobs += 1
        self._on_end[self._jobs] = on_end
        return self._jobs

    def _on_done(self, done: Done) -> None:
        self._on_end.pop(done.job_id)(done)
        self._pump.announce()

    def _bytes_at(self, span: Span) -> torch.Tensor:
        view = self._slab.view[span.offset : span.offset + span.nbytes]
        return torch.frombuffer(view, dtype=torch.uint8)

    def _tensor_at(self, item: Item) -> torch.Tensor:
        """The payload of an item, in place."""
        payload = self._bytes_at(item.span)[HEADER_BYTES:]
        return payload.view(self._rows.dtype).view(-1, *self._rows.shape)


def _key(content_hash: bytes) -> ChunkKey:
    if not 1 <= len(content_hash) <= MAX_HASH_BYTES:
        raise ValueError(
            f"content hash of {len(content_hash)} bytes: allowed are 1 to {MAX_HASH_BYTES}"
        )
    return ChunkKey(GROUP, content_hash)


def _divided(config: Config, rows: TensorRows) -> tuple[ItemTable, list[Span]]:
    """The memory: a table that holds the largest item, and berths behind it."""
    if config.eviction == "s3fifo":
        raise ConfigError(
            "eviction is 's3fifo': allowed is 'lru' or 'sieve' for tensors by content hash, "
            "because it counts what it holds and they differ in size"
        )
    berth_pages = -(-config.max_item_bytes // PAGE_BYTES)
    berth_bytes = berth_pages * PAGE_BYTES
    least = berth_bytes + (1 << order_of(berth_pages)) * PAGE_BYTES
    if rows.host_bytes < least:
        raise ConfigError(
            f"host_bytes of the tensors is {rows.host_bytes}: allowed is {least} or more while "
            f"max_item_bytes is {config.max_item_bytes}. Set max_item_bytes to the largest tensor "
            "you have, or give them more memory"
        )
    share = rows.host_bytes // _BERTHS_SHARE // berth_bytes
    count = max(1, min(_BERTHS_MAX, share))
    table_bytes = (rows.host_bytes // PAGE_BYTES - count * berth_pages) * PAGE_BYTES
    offsets = (table_bytes + n * berth_bytes for n in range(count))
    berths = [Span(offset, config.max_item_bytes) for offset in offsets]
    return ItemTable(table_bytes, config.eviction), berths
