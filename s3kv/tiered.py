"""The three tiers without vLLM: device, host memory and bucket behind one small API.

    async with await TieredStore.open(
        Config.parse({"bucket": "my-bucket"}),
        shapes={"kv": ((16, 2, 128), torch.bfloat16)},
        namespace={"model": "my-model"},
    ) as store:
        await store.put(block_hash, {"kv": tensor})
        hit = await store.get(block_hash, into={"kv": tensor})

and, beside such blocks, tensors of any number of rows by the hash of their content (`tensors`).
The same slab, I/O process, object format and ledger as under vLLM, driven by the caller's asyncio
loop. All methods are for that loop's thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any

import torch

from s3kv.config import Config
from s3kv.device.blocks import DeviceBlocks
from s3kv.device.tensors import BlockTensors
from s3kv.errors import ConfigError
from s3kv.host.policy import make_policy
from s3kv.host.slab import Slab
from s3kv.host.slots import SlotTable
from s3kv.io.client import IoClient
from s3kv.io.complaints import Complaints
from s3kv.io.wire import Done, Hello
from s3kv.messages import JobEnd, JobKind, SaveOrder
from s3kv.objects.codec import ChunkFormat
from s3kv.objects.integrity import Integrity
from s3kv.objects.keys import Namespace, canonical_json, fingerprint_digest
from s3kv.planning.breaker import Breaker
from s3kv.planning.index import BucketIndex
from s3kv.planning.ledger import ChunkLedger, ChunkState, Job
from s3kv.pump import Pump, started
from s3kv.tensors import TensorRows, TensorStore
from s3kv.types import ChunkKey, Location, Outcome

_INDEX_CHUNKS = 2_000_000
_BREAKER_FAILURES = 5
_GROUP = 0
_SHARD = "t0of1-p0of1"


class TieredStore:
    """A store of equally shaped blocks by hash, and of tensors with rows if it was opened for them.
    Made by `open`, ended by `close`.
    """

    def __init__(
        self,
        config: Config,
        tensors: BlockTensors,
        chunk: ChunkFormat,
        slab: Slab,
        slot_bytes: int,
        client: IoClient,
        ledger: ChunkLedger,
        hot: DeviceBlocks | None,
    ) -> None:
        self._config = config
        self._tensors = tensors
        self._chunk = chunk
        self._slab = slab
        self._slot_bytes = slot_bytes
        self._client = client
        self._ledger = ledger
        self._hot = hot
        self._rows: TensorStore | None = None
        self._kinds: dict[int, JobKind] = {}
        self._complaints = Complaints(time.monotonic)
        self._pump = Pump(client, slab, self._done, self._is_busy)

    @classmethod
    async def open(
        cls,
        config: Config,
        *,
        shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
        namespace: Mapping[str, Any],
        device: str | torch.device = "cpu",
        device_blocks: int = 0,
        tensors: TensorRows | None = None,
    ) -> TieredStore:
        """Start on a bucket.

        shapes: what every block consists of: name to shape and dtype.
        namespace: plain values that say what the blocks mean (model, revision, …); two stores
            see each other's blocks when these, the shapes and the prefix are equal.
        device_blocks: blocks kept on `device` as a tier of its own, 0 for none.
        tensors: what `put_tensor` and `get_tensor` are to take, and their memory, which is not
            part of `host_bytes`; None for none. They have an I/O process of their own.
        Raises `ConfigError`, or a `StoreError` when the bucket cannot be used.
        """
        blocks = BlockTensors(shapes)
        integrity = Integrity.of(config)
        identity = {
            "namespace": dict(namespace),
            "tensors": [_plain(t) for t in blocks.specs],
            "integrity": integrity.identity(),
        }
        place = Namespace(config.prefix, fingerprint_digest(identity))
        chunk = ChunkFormat(place.digest, blocks.specs, _GROUP, _SHARD, integrity)
        slot_bytes = -(-chunk.object_bytes // 4096) * 4096
        count = config.host_bytes // slot_bytes
        if count < 1:
            raise ConfigError(
                f"host_bytes is {config.host_bytes}: allowed is at least one block, {slot_bytes}"
            )
        slab = Slab.create(count * slot_bytes, huge_pages=config.huge_pages)
        hello = _hello(config, place, blocks, integrity, canonical_json(identity))
        client = await started(hello, slab)
        ledger = _ledger(config, count)
        hot = DeviceBlocks(blocks, device_blocks, torch.device(device)) if device_blocks else None
        store = cls(config, blocks, chunk, slab, slot_bytes, client, ledger, hot)
        if tensors is not None:
            await store._open_rows(tensors, namespace)
        return store

    async def __aenter__(self) -> TieredStore:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    # --- the tiers -------------------------------------------------------------------------

    async def put(self, block_hash: bytes, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Keep the block: on the device, in host memory, and in the background in the bucket.

        The tensors may be on any device; they are read before this returns and are the caller's
        again then. False when host memory is full of blocks the bucket does not have yet: then
        nothing was kept there. Raises `ValueError` for tensors of another shape or dtype.
        """
        self._tensors.check(tensors)
        return await self._pump.whole(self._put(ChunkKey(_GROUP, block_hash), tensors))

    async def get(self, block_hash: bytes, into: Mapping[str, torch.Tensor]) -> bool:
        """Fill `into` with the block, from the nearest tier that has it. False on a miss.

        On a miss, and when cancelled, what `into` holds is undefined.
        """
        self._tensors.check(into)
        return await self._pump.whole(self._get(ChunkKey(_GROUP, block_hash), into))

    def prefetch(self, block_hashes: Iterable[bytes]) -> int:
        """Get these blocks on their way to host memory, without waiting for them.

        Returns how many are on their way or there already; the others the bucket is known not to
        have, or there is no room for.
        """
        on_their_way = 0
        for block_hash in block_hashes:
            key = ChunkKey(_GROUP, block_hash)
            state = self._ledger.state(key)
            if state is not ChunkState.ABSENT or self._fetch(key) is not None:
                on_their_way += 1
        return on_their_way

    def where(self, block_hash: bytes) -> Location:
        """Which tiers hold the block, as far as is known without asking."""
        key = ChunkKey(_GROUP, block_hash)
        return Location(
            device=self._hot is not None and self._hot.holds(key),
            host=self._ledger.state(key) is ChunkState.RESIDENT,
            bucket=self._ledger.index.verdict(key, time.monotonic()),
        )

    async def put_tensor(self, content_hash: bytes, tensor: torch.Tensor) -> bool:
        """As `TensorStore.put`. Raises `ConfigError` in a store opened without `tensors`."""
        return await self._opened_rows().put(content_hash, tensor)

    async def get_tensor(
        self, content_hash: bytes, device: str | torch.device | None = None
    ) -> torch.Tensor | None:
        """As `TensorStore.get`. Raises `ConfigError` in a store opened without `tensors`."""
        return await self._opened_rows().get(content_hash, device)

    def where_tensor(self, content_hash: bytes) -> Location:
        """As `TensorStore.where`. Raises `ConfigError` in a store opened without `tensors`."""
        return self._opened_rows().where(content_hash)

    @property
    def counters(self) -> Mapping[str, int]:
        """What has happened so far, in the words of the metrics."""
        return self._ledger.counters

    @property
    def tensor_counters(self) -> Mapping[str, int]:
        """The same of `put_tensor` and `get_tensor`."""
        return self._opened_rows().counters

    async def flush(self) -> None:
        """Wait until the bucket has answered for everything put so far."""
        while self._ledger.saves_inflight:
            await self._pump.next_end()
        if self._rows is not None:
            await self._rows.flush()

    async def close(self) -> None:
        """End what is under way and give everything back. Uploads get as long as they need, but
        no longer than `drain_timeout_s`. Idempotent.
        """
        closing = [self._pump.close(self._config.drain_timeout_s)]
        if self._rows is not None:
            closing.append(self._rows.close())
        await asyncio.gather(*closing)

    # --- inside ----------------------------------------------------------------------------

    async def _open_rows(self, tensors: TensorRows, namespace: Mapping[str, Any]) -> None:
        try:
            self._rows = await TensorStore.open(self._config, tensors, namespace=namespace)
        except BaseException:
            await self.close()
            raise

    def _opened_rows(self) -> TensorStore:
        if self._rows is None:
            raise ConfigError(
                "this store was opened for blocks alone: say TieredStore.open(..., "
                "tensors=TensorRows(shape of one row, dtype)) to keep tensors by content hash"
            )
        return self._rows

    async def _put(self, key: ChunkKey, tensors: Mapping[str, torch.Tensor]) -> bool:
        if self._hot is not None:
            self._hot.put(key, tensors)
        if self._ledger.state(key) is not ChunkState.ABSENT:
            return True
        if not self._ledger.plan_save(key, ()):
            return False
        (order,) = self._ledger.take_saves()
        try:
            await asyncio.to_thread(self._tensors.copy_out, tensors, self._payload(order.slot))
        except RuntimeError:
            self._copied(order, Outcome.FAILED)
            raise
        self._copied(order, Outcome.OK)
        return True

    def _copied(self, order: SaveOrder, outcome: Outcome) -> None:
        self._end(JobEnd(order.job_id, JobKind.SAVE, outcome, 0, 0.0))
        if outcome.is_success:
            self._upload(order.job_id, order.key, order.slot)
        else:
            self._end(JobEnd(order.job_id, JobKind.UPLOAD, Outcome.CANCELLED, 0, 0.0))

    async def _get(self, key: ChunkKey, into: Mapping[str, torch.Tensor]) -> bool:
        if self._hot is not None and self._hot.get(key, into):
            return True
        while self._ledger.state(key) is ChunkState.COPYING:
            await self._pump.next_end()
        if self._ledger.state(key) is not ChunkState.RESIDENT and not await self._arrival(key):
            return False
        slots = self._ledger.slots
        slot = slots.lookup(key)
        if slot is None or self._ledger.state(key) is not ChunkState.RESIDENT:
            return False
        slots.pin(slot)
        try:
            await asyncio.to_thread(self._tensors.copy_in, self._payload(slot.number), into)
        finally:
            slots.unpin(slot)
        slots.touch_chain([slot])
        if self._hot is not None:
            self._hot.put(key, into)
        return True

    async def _arrival(self, key: ChunkKey) -> bool:
        job = self._fetch(key)
        if job is None:
            return False
        arrived: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        job.waiters.append(arrived)
        return await arrived

    def _fetch(self, key: ChunkKey) -> Job | None:
        now_s = time.monotonic()
        ledger = self._ledger
        if ledger.state(key) is ChunkState.FETCHING:
            return ledger.fetch_job(key)
        if ledger.index.is_absent(key, now_s) or not ledger.breaker.allows(now_s):
            return None
        job = ledger.plan_fetch(key)
        for order in ledger.take_fetches():
            self._kinds[order.job_id] = JobKind.FETCH
            self._client.fetch(order.job_id, order.key, order.slot * self._slot_bytes)
        self._pump.wake()
        return job

    def _upload(self, job_id: int, key: ChunkKey, slot: int) -> None:
        self._kinds[job_id] = JobKind.UPLOAD
        self._client.upload(job_id, key, slot * self._slot_bytes)
        self._pump.wake()

    def _payload(self, slot: int) -> torch.Tensor:
        start = slot * self._slot_bytes + self._chunk.header_bytes
        view = self._slab.view[start : start + self._chunk.payload_bytes]
        return torch.frombuffer(view, dtype=torch.uint8)

    def _is_busy(self) -> bool:
        for order in self._ledger.take_uploads(time.monotonic()):
            self._upload(order.job_id, order.key, order.slot)
        return bool(self._kinds or self._ledger.saves_inflight)

    def _done(self, done: Done) -> None:
        kind = self._kinds.pop(done.job_id)
        if done.reason:
            self._ledger.counters[f"{kind.value}_corrupt_{done.reason}"] += 1
        self._complaints.note(kind.value, done.outcome, done.detail)
        self._end(JobEnd(done.job_id, kind, done.outcome, done.nbytes, done.seconds))

    def _end(self, end: JobEnd) -> None:
        job = self._ledger.on_end(end, time.monotonic())
        for arrived in job.waiters if job is not None else ():
            if not arrived.done():
                arrived.set_result(end.outcome.is_success)
        self._pump.announce()


def _hello(
    config: Config, place: Namespace, blocks: BlockTensors, integrity: Integrity, manifest: bytes
) -> Hello:
    return Hello(
        config,
        place.prefix,
        place.digest,
        _SHARD,
        {_GROUP: blocks.specs},
        integrity=integrity,
        manifest=manifest,
    )


def _ledger(config: Config, slots: int) -> ChunkLedger:
    return ChunkLedger(
        SlotTable(slots, make_policy(config.eviction, slots)),
        BucketIndex(capacity=_INDEX_CHUNKS, miss_ttl_s=config.miss_ttl_s),
        Breaker(threshold=_BREAKER_FAILURES),
        world_size=1,
    )


def _plain(spec: Any) -> dict[str, Any]:
    return {"name": spec.name, "dtype": spec.dtype, "shape": list(spec.shape)}
