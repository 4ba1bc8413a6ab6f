"""Gathering a request's prefix in host memory: lease what is there, ask for what is not.

The GET is the probe. A prefix is asked for from its front, `probe_chunks` at a time when nothing is
known of it (the window doubles with every arrival), hundreds as far as the bucket index says
present; the first chunk that is missing ends the prefix. A chunk that is already on its way
for somebody is joined, never asked for twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from s3kv.host.slots import Slot
from s3kv.messages import JobKind
from s3kv.planning.ledger import ChunkLedger, ChunkState, Job
from s3kv.planning.requests import RequestRecord
from s3kv.types import ChunkKey

_KNOWN_WINDOW_CHUNKS = 256
"""How far ahead chunks known to be in the bucket are asked for. More than any network keeps in
flight."""
_ORDERS_PER_LOOKUP = 32
"""Fetches ordered inside the engine's scheduling loop, whose thread an order takes for 3 to 5 µs;
the others follow in the next steps. When a request arrives, all of the window is ordered: if that
had to wait for more of the engine's steps, which may take hundreds of ms, so would the network."""


@dataclass(frozen=True, slots=True)
class KVPlannerSettings:
    """Sizes are in tokens; block_tokens and hash_tokens divide chunk_tokens."""

    chunk_tokens: int
    block_tokens: int
    hash_tokens: int
    probe_chunks: int
    max_wait_s: float
    recompute_gate: bool
    max_saves_inflight: int
    may_load: bool = True
    may_save: bool = True
    group: int = 0


class PrefixCollector:
    """Leases and fetches for requests. Same process, thread and clock as the planner."""

    def __init__(self, ledger: ChunkLedger, settings: KVPlannerSettings) -> None:
        self._ledger = ledger
        self._settings = settings
        self._unfinished: dict[str, RequestRecord] = {}
        self._hash_stride = settings.chunk_tokens // settings.hash_tokens
        self._salt = b""

    @property
    def _counters(self) -> Counter[str]:
        return self._ledger.counters

    def prefetch(self, record: RequestRecord, local_tokens: int, now_s: float) -> None:
        """`collect` for a request that has just arrived."""
        self.collect(record, local_tokens, now_s, orders=_KNOWN_WINDOW_CHUNKS)

    def collect(
        self,
        record: RequestRecord,
        local_tokens: int,
        now_s: float,
        orders: int = _ORDERS_PER_LOOKUP,
    ) -> None:
        """Lease what is resident from the request's first missing chunk on, ask for more.

        `record.end` bounds what is asked for; what is here anyway is taken beyond it too. Not more
        than `orders` fetches are ordered; `go_on` orders the others.
        """
        first = local_tokens // self._settings.chunk_tokens
        record.local_tokens = local_tokens
        if first != record.first:
            self.release(record)
            record.first = record.ready = record.asked = first
        hashes = self.hashes(record)
        end = len(hashes) if record.end is None else min(record.end, len(hashes))
        self._lease_prefix(record, hashes)
        full = self._counters["fetches"] + orders
        while record.asked < end and self._ask(record, record.asked, now_s):
            record.asked += 1
            if self._counters["fetches"] == full:
                record.news = True
                self._unfinished[record.request_id] = record
                break
        else:
            self._unfinished.pop(record.request_id, None)

    def go_on(self, now_s: float) -> None:
        """`collect` for the first of those that had too much to order at once. For every step: the
        engine does not look up every request in every one."""
        while self._unfinished:
            request_id = next(iter(self._unfinished))
            record = self._unfinished[request_id]
            if record.wants_chunks:
                self.collect(record, record.local_tokens, now_s)
                return
            del self._unfinished[request_id]

    def _lease_prefix(self, record: RequestRecord, hashes: Sequence[bytes]) -> None:
        slots = self._ledger.slots.pin_prefix(self._settings.group, hashes, record.ready)
        record.prefix += slots
        record.ready += len(slots)
        record.asked = max(record.asked, record.ready)
        for position in [p for p in record.early if p < record.ready]:
            self._ledger.slots.unpin(record.early.pop(position))

    def lease_early(self, record: RequestRecord, position: int, slot: Slot) -> None:
        """Keep a resident chunk for the request until its prefix reaches it."""
        if position >= record.ready and position not in record.early:
            self._ledger.slots.pin(slot)
            record.early[position] = slot

    def _ask(self, record: RequestRecord, position: int, now_s: float) -> bool:
        """Get the chunk at `position` on its way. False: go no further than this, for now."""
        if position in record.pending or position in record.early:
            return True
        ledger = self._ledger
        key = ChunkKey(self._settings.group, record.hashes[position])
        state = ledger.state(key)
        if state is ChunkState.RESIDENT:
            slot = ledger.slots.lookup(key)
            assert slot is not None
            self.lease_early(record, position, slot)
            return True
        in_window = position < record.ready + record.window
        known = position < record.ready + _KNOWN_WINDOW_CHUNKS and ledger.index.is_present(key)
        if state is ChunkState.FETCHING and in_window:
            job = ledger.fetch_job(key)
        elif state is ChunkState.ABSENT and (in_window or known):
            if ledger.index.is_absent(key, now_s):
                self._counters["fetches_spared"] += 1
                record.end = position
                return False
            fetch = self._fetch(key, now_s)
            if fetch is None:
                return False
            job = fetch
            if ledger.residency is not None:
                ledger.residency.origin(key, JobKind.FETCH, record.request_id, position)
        else:
            return False
        job.waiters.append((record, position))
        record.pending[position] = job
        record.asked_s = now_s
        return True

    def _fetch(self, key: ChunkKey, now_s: float) -> Job | None:
        """None when nothing can be asked now; the next lookup tries again."""
        ledger = self._ledger
        if not ledger.breaker.allows(now_s):
            self._counters["fetches_refused_by_breaker"] += 1
            return None
        return ledger.plan_fetch(key)

    def release_early(self, record: RequestRecord) -> None:
        """Give back what is behind the prefix that is ready."""
        for slot in record.early.values():
            self._ledger.slots.unpin(slot)
        record.early.clear()

    def release(self, record: RequestRecord) -> None:
        """Give back all leases; to be leased again, the prefix has to be collected anew."""
        for slot in record.prefix:
            self._ledger.slots.unpin(slot)
        record.prefix.clear()
        self._unfinished.pop(record.request_id, None)
        record.ready = record.asked = record.first
        self.release_early(record)

    def hashes(self, record: RequestRecord) -> list[bytes]:
        stride, known = self._hash_stride, len(record.hashes)
        fresh = record.block_hashes[(known + 1) * stride - 1 :: stride]
        if fresh:
            record.hashes += [self._salted(h) for h in fresh] if self._salt else fresh
        return record.hashes

    def _salted(self, block_hash: bytes) -> bytes:
        return blake2b(block_hash, key=self._salt, digest_size=32).digest()

    def reset(self, salt: bytes) -> None:
        """Derive all chunk hashes from now on with `salt`."""
        self._salt = salt
