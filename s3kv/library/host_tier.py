"""Host tier: a store's blocks in host memory, and the jobs that move them to and from the bucket.

The ledger decides (`planning.ledger`); the caller's asyncio loop drives it through a `Pump`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from s3kv.host.placement import NodeChoice
from s3kv.host.room import EqualSlots
from s3kv.host.table import Entry, EntryState, Table
from s3kv.io.tier import Slots, Tier
from s3kv.io.wire import Handshake
from s3kv.library.pump import Pump, carried, claimed, opened, succeeded
from s3kv.messages import JobEnd, JobKind
from s3kv.planning.breaker import Breaker
from s3kv.planning.index import BucketIndex
from s3kv.planning.job import Job
from s3kv.planning.ledger import ChunkState, Ledger
from s3kv.types import ChunkKey, Outcome

logger = logging.getLogger("s3kv")

_OWED_MAX = 1_000_000
"""Most hashes recorded for `flush`, about 200 MB. Further ones replace the oldest, which happens if
the bucket stays unreachable and `flush` is never called."""


class HostTier:
    """The host tier of a store, made by `open`. Call all methods on the thread of the loop that
    opened it. An owner that makes copies uses `pump`, and `watch` to have them polled."""

    def __init__(self, slots: Slots, tier: Tier) -> None:
        self.slot_bytes = slots.slot_bytes
        (self.chunk,) = slots.formats.values()
        self.ledger = Ledger(
            Table(EqualSlots(slots.count, slots.slot_bytes)),
            BucketIndex(),
            Breaker(has_disk=tier.handshake.config.disk_path is not None),
            world_size=1,
        )
        self.pump = Pump(tier, self._on_done, self._is_busy)
        self.slab = tier.slab
        self._owed: dict[ChunkKey, None] = {}
        """Hashes that were put and are not in the bucket yet, oldest first."""
        self._poll_copies: Callable[[], bool] = bool

    @classmethod
    async def open(cls, handshake: Handshake, node: NodeChoice) -> HostTier:
        """Open a tier with as many slots as fit into `host_bytes`, and an I/O process that has
        tried the bucket. node: NUMA node for the memory. Raises `ConfigError` if no slot fits,
        `IoProcessError` if the process fails, a `StoreError` if the bucket cannot be used."""
        slots = Slots.of(handshake)
        return cls(slots, await opened(handshake, slots.nbytes, node))

    def payload(self, slot: int) -> memoryview:
        """The bytes of the block in a slot, shared with the I/O process."""
        start = slot * self.slot_bytes + self.chunk.header_bytes
        return self.slab.view[start : start + self.chunk.payload_bytes]

    def watch(self, poll: Callable[[], bool], close: Callable[[], object]) -> None:
        """Call `poll` about every millisecond while it returns True, which means that a copy is
        under way. The caller calls `pump.wake` after starting a copy. close: called before the slab
        is closed."""
        self._poll_copies = poll
        self.pump.before_slab(close)

    def holds(self, key: ChunkKey) -> bool:
        """Whether `key` is in host memory."""
        return self.ledger.state(key) is ChunkState.RESIDENT

    async def put_by(
        self, key: ChunkKey, fill: Callable[[Job], Awaitable[bool]], *, wait: bool = False
    ) -> bool:
        """Copy `key` to host memory, if it is not there. Returns whether it is there afterwards.

        fill: copies it to the place of the job, ends the copy with `copied`, and returns whether it
            succeeded.
        wait: wait for room instead of returning False.
        """
        while not await self._settled(key):
            job = self.reserve(key)
            if job is not None:
                kept = await fill(job)
                if not kept:  # the result reports it, so `flush` need not
                    self._owed.pop(key, None)
                return kept
            if not wait:
                return False
            self.ledger.counters.subtract(("saves_dropped", "saves_without_room"))  # it waits
            await self.pump.next_end()
            self.pump.check_open()
        self.hit(key)
        return True

    def reserve(self, key: ChunkKey) -> Job | None:
        """Reserve a place until `copied`, for the copy of a key that is not in host memory. None if
        there is no room."""
        job = self.ledger.plan_save(key, ())
        if job is not None:
            self._owe(key)
        else:
            self.ledger.counters["saves_dropped"] += 1
        return job

    def copied(self, job: Job, ok: bool) -> None:
        """End the copy to a place, which is no longer written to. ok: the place holds the object,
        and its upload starts now; otherwise the place is free again."""
        self._end(JobEnd(job.job_id, JobKind.SAVE, Outcome.OK if ok else Outcome.FAILED))
        if ok:
            self.pump.submit(job.for_bucket())
        else:
            self._end(JobEnd(job.job_id, JobKind.UPLOAD, Outcome.CANCELLED))

    async def copied_by(self, job: Job, copying: asyncio.Future[Any]) -> bool:
        """End the copy to a place when `copying` has ended. Returns whether it succeeded."""
        try:
            await carried(copying)
        except RuntimeError as error:
            logger.warning("s3kv: a block was not kept, its copy failed: %s", error)
        finally:
            self.copied(job, succeeded(copying))
        return succeeded(copying)

    def hit(self, key: ChunkKey) -> None:
        """Record a use of a key in host memory or on the device. If its upload was given up, retry
        it. If the bucket may have deleted it meanwhile, check that, so that it is refreshed or
        uploaded again."""
        self.ledger.unsaved.hit(key)
        self.ledger.index.use(key, time.monotonic())
        if self.ledger.unsaved.wanted or self.ledger.index.due:  # now, as `due` holds only a few
            self._start_due()

    async def pinned(self, key: ChunkKey) -> Entry | None:
        """Pin `key` in host memory until `unpin`, and return its entry; None on a miss. Fetches the
        object from the bucket if host memory does not have it."""
        while self.ledger.state(key) is ChunkState.COPYING:
            await self.pump.next_end()
        entry = self.ledger.table.lookup(key)
        if entry is not None and entry.is_resident:
            self.ledger.table.pin(entry)
        else:
            job = self.fetch(key)
            if job is None:
                return None
            arrived: asyncio.Future[Entry | None] = asyncio.get_running_loop().create_future()
            job.waiters.append(arrived)
            entry = await claimed(arrived, self.unpin)
        if entry is not None:
            self.ledger.table.touch_chain([entry])
            self.hit(key)
        return entry

    def unpin(self, entry: Entry) -> None:
        self.ledger.table.unpin(entry)
        self.pump.announce()

    def prefetch(self, keys: Iterable[ChunkKey]) -> int:
        """Start fetches of the keys that are not in host memory, as long as fetches under way take
        less than half of it. Returns how many of `keys` are in host memory or on their way."""
        return sum(self._is_coming(key) for key in keys)

    def fetch(self, key: ChunkKey) -> Job | None:
        """Join or start the fetch of a key that is not in host memory. None if the key is known to
        be absent from the bucket, or cannot be fetched now."""
        if self.ledger.state(key) is ChunkState.FETCHING:
            return self.ledger.fetch_job(key)
        now_s = time.monotonic()
        if self.pump.is_closing or self.ledger.refusal(key, now_s) is not None:
            return None
        job = self.ledger.plan_fetch(key, now_s)
        if job is not None:
            self.pump.submit(job.for_bucket())
        return job

    async def flush(self) -> tuple[bytes, ...]:
        """Wait until no upload of an earlier put is under way or waits for its next attempt, and no
        check whether the bucket still has a used key is pending. Returns the hashes that the bucket
        lacks, and forgets those that have left host memory. Raises `ClosedError` if the store is
        closed meanwhile."""
        self.pump.check_open()
        self._start_due()
        while self.ledger.uses_inflight:
            await self.pump.next_end()
            self.pump.check_open()
        left = list(self._owed)
        while True:
            for key in left:
                while key in self._owed and self._is_leaving(key):
                    await self.pump.next_end()
                    self.pump.check_open()
            left = [key for key in left if key in self._owed]
            for key in left:
                self.ledger.unsaved.hit(key)
            self._start_due()
            # The pump's timer may have started some of them meanwhile.
            if not any(map(self._is_leaving, left)):
                break
        for key in left:
            if not self.holds(key):
                del self._owed[key]
        return tuple(key.block_hash for key in left)

    async def close(self, drain_timeout_s: float | None = None) -> None:
        """Close as `Pump.close` does. Logs how many entries the bucket lacks."""
        await self.pump.close(drain_timeout_s)
        if self._owed:
            logger.warning(
                "s3kv: closed with %d blocks that the bucket does not have", len(self._owed)
            )
            self._owed.clear()

    async def _settled(self, key: ChunkKey) -> bool:
        """Wait while `key` is on its way to host memory. Returns whether it has arrived."""
        while (state := self.ledger.state(key)) is not ChunkState.ABSENT:
            if state is ChunkState.RESIDENT:
                return True
            await self.pump.next_end()
        return False

    def _arrived(self, job: Job, entry: Entry | None) -> None:
        """Notify the waiters of a fetch. Pins the entry for each of them, so that it cannot be
        evicted before they run."""
        for arrived in (waiter for waiter in job.waiters if not waiter.get_loop().is_closed()):
            if entry is not None:
                self.ledger.table.pin(entry)
            arrived.set_result(entry)

    def _is_coming(self, key: ChunkKey) -> bool:
        if self.ledger.state(key) is not ChunkState.ABSENT:
            return True
        has_room = self.ledger.fetches_inflight < self.ledger.table.count // 2
        return has_room and self.fetch(key) is not None

    def _owe(self, key: ChunkKey) -> None:
        self._owed.pop(key, None)
        self._owed[key] = None
        if len(self._owed) > _OWED_MAX:
            del self._owed[next(iter(self._owed))]

    def _is_leaving(self, key: ChunkKey) -> bool:
        entry = self.ledger.table.lookup(key)
        return entry is not None and entry.state is not EntryState.CLEAN

    def _start_due(self) -> None:
        for job in self.ledger.plan_due(time.monotonic()):
            if job.kind is JobKind.UPLOAD:
                self._owe(job.key)
            self.pump.submit(job.for_bucket())

    def _is_busy(self) -> bool:
        self._start_due()
        ledger = self.ledger
        jobs = ledger.fetches_inflight or ledger.saves_inflight or ledger.uses_inflight
        return bool(self._poll_copies() or jobs)

    def _on_done(self, end: JobEnd) -> None:
        if end.reason:
            self.ledger.counters[f"{end.kind.value}_corrupt_{end.reason}"] += 1
        self._end(end)

    def _end(self, end: JobEnd) -> None:
        job = self.ledger.on_end(end, time.monotonic())
        if job is not None and job.asked_bucket and end.outcome.is_success:
            self._owed.pop(job.key, None)
        if job is not None and job.key in self.ledger.unsaved:
            self._owe(job.key)
        if job is not None and job.is_fetch:
            self._arrived(job, job.entry if end.outcome.is_success else None)
        self.pump.announce()
