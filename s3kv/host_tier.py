"""Blocks of one size in host memory and in the bucket, driven by a caller's asyncio loop."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable

from s3kv.config import Config
from s3kv.errors import ConfigError
from s3kv.host.numa import NodeChoice
from s3kv.host.policy import make_policy
from s3kv.host.slab import Slab
from s3kv.host.slots import Slot, SlotTable
from s3kv.io.client import IoClient
from s3kv.io.complaints import Complaints
from s3kv.io.wire import Done, Hello
from s3kv.messages import JobEnd, JobKind, SaveOrder
from s3kv.objects.codec import ChunkFormat
from s3kv.planning.breaker import Breaker
from s3kv.planning.index import BucketIndex
from s3kv.planning.ledger import ChunkLedger, ChunkState, Job
from s3kv.pump import Pump, started
from s3kv.types import ChunkKey, Outcome

_INDEX_CHUNKS = 2_000_000
_BREAKER_FAILURES = 5


class HostTier:
    """Made by `open`. All methods are for the thread of the loop that opened it.

    A chunk here is one block. `pump` is for whoever has copies of its own: `watch` them.
    """

    def __init__(
        self, config: Config, chunk: ChunkFormat, slab: Slab, slot_bytes: int, client: IoClient
    ) -> None:
        slots = slab.nbytes // slot_bytes
        self.ledger = ChunkLedger(
            SlotTable(slots, make_policy(config.eviction, slots)),
            BucketIndex(capacity=_INDEX_CHUNKS, miss_ttl_s=config.miss_ttl_s),
            Breaker(threshold=_BREAKER_FAILURES),
            world_size=1,
        )
        self.pump = Pump(client, slab, self._on_done, self._is_busy)
        self.slab = slab
        self.slot_bytes = slot_bytes
        self._chunk = chunk
        self._client = client
        self._kinds: dict[int, JobKind] = {}
        self._complaints = Complaints(time.monotonic)
        self._poll_copies: Callable[[], bool] = bool

    @classmethod
    async def open(
        cls, config: Config, chunk: ChunkFormat, slot_bytes: int, hello: Hello, node: NodeChoice
    ) -> HostTier:
        """Memory for as many slots as `host_bytes` holds, and an I/O process that has tried the
        bucket. node: where the memory should be. Raises `ConfigError`, or a `StoreError` when the
        bucket cannot be used.
        """
        slots = config.host_bytes // slot_bytes
        if slots < 1:
            raise ConfigError(
                f"host_bytes is {config.host_bytes}: allowed is at least one block, {slot_bytes}"
            )
        slab = Slab.create(slots * slot_bytes, node=node, huge_pages=config.huge_pages)
        return cls(config, chunk, slab, slot_bytes, await started(hello, slab))

    def watch(self, poll: Callable[[], bool]) -> None:
        """Call `poll` every millisecond or so while it says that it waits for something; after it
        has begun to, `pump.wake` is called.
        """
        self._poll_copies = poll

    # --- blocks ----------------------------------------------------------------------------

    def state(self, key: ChunkKey) -> ChunkState:
        return self.ledger.state(key)

    def in_bucket(self, key: ChunkKey) -> bool | None:
        """None when nobody has asked the bucket yet."""
        return self.ledger.index.verdict(key, time.monotonic())

    @property
    def counters(self) -> Counter[str]:
        return self.ledger.counters

    def payload(self, slot: int) -> memoryview:
        """The bytes of the block in a slot, shared with the I/O process."""
        start = slot * self.slot_bytes + self._chunk.header_bytes
        return self.slab.view[start : start + self._chunk.payload_bytes]

    async def pinned(self, key: ChunkKey) -> Slot | None:
        """The slot that holds the block, from the bucket if need be, pinned until `unpin`. None on
        a miss.
        """
        while self.state(key) is ChunkState.COPYING:
            await self.pump.next_end()
        if self.state(key) is not ChunkState.RESIDENT and not await self._arrival(key):
            return None
        slot = self.ledger.slots.lookup(key)
        if slot is None or self.state(key) is not ChunkState.RESIDENT:
            return None
        self.ledger.slots.pin(slot)
        self.ledger.slots.touch_chain([slot])
        return slot

    def unpin(self, slot: Slot) -> None:
        self.ledger.slots.unpin(slot)

    def fetch(self, key: ChunkKey) -> Job | None:
        """The fetch of a block that is not here: under way, or ordered now. None when it is known
        to be absent, or cannot be asked for.
        """
        now_s = time.monotonic()
        ledger = self.ledger
        if ledger.state(key) is ChunkState.FETCHING:
            return ledger.fetch_job(key)
        if ledger.index.is_absent(key, now_s) or not ledger.breaker.allows(now_s):
            return None
        job = ledger.plan_fetch(key)
        for order in ledger.take_fetches():
            self._kinds[order.job_id] = JobKind.FETCH
            self._client.fetch(order.job_id, order.key, order.slot * self.slot_bytes)
        self.pump.wake()
        return job

    def reserve(self, key: ChunkKey) -> SaveOrder | None:
        """A slot to copy a block to that is not here, until `copied`. None without room."""
        if not self.ledger.plan_save(key, ()):
            return None
        (order,) = self.ledger.take_saves()
        return order

    def copied(self, order: SaveOrder, ok: bool) -> None:
        """Nothing writes to the slot any more. ok: it holds the block, which is uploaded now."""
        outcome = Outcome.OK if ok else Outcome.FAILED
        self._end(JobEnd(order.job_id, JobKind.SAVE, outcome, 0, 0.0))
        if ok:
            self._upload(order.job_id, order.key, order.slot)
        else:
            self._end(JobEnd(order.job_id, JobKind.UPLOAD, Outcome.CANCELLED, 0, 0.0))

    async def flush(self) -> None:
        """Wait until the bucket has answered for every slot reserved so far."""
        while self.ledger.saves_inflight:
            await self.pump.next_end()

    # --- inside ----------------------------------------------------------------------------

    async def _arrival(self, key: ChunkKey) -> bool:
        job = self.fetch(key)
        if job is None:
            return False
        arrived: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        job.waiters.append(arrived)
        return await arrived

    def _upload(self, job_id: int, key: ChunkKey, slot: int) -> None:
        self._kinds[job_id] = JobKind.UPLOAD
        self._client.upload(job_id, key, slot * self.slot_bytes)
        self.pump.wake()

    def _is_busy(self) -> bool:
        for order in self.ledger.take_uploads(time.monotonic()):
            self._upload(order.job_id, order.key, order.slot)
        return bool(self._poll_copies() or self._kinds or self.ledger.saves_inflight)

    def _on_done(self, done: Done) -> None:
        kind = self._kinds.pop(done.job_id)
        if done.reason:
            self.counters[f"{kind.value}_corrupt_{done.reason}"] += 1
        self._complaints.note(kind.value, done.outcome, done.detail)
        self._end(JobEnd(done.job_id, kind, done.outcome, done.nbytes, done.seconds))

    def _end(self, end: JobEnd) -> None:
        job = self.ledger.on_end(end, time.monotonic())
        for arrived in job.waiters if job is not None else ():
            if not arrived.done():
                arrived.set_result(end.outcome.is_success)
        self.pump.announce()
