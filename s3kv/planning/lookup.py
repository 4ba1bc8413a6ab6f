"""Lookups of a request, one per coverage: their contract, and the chunks that each holds.

A lookup leases resident chunks and requests the others. The GET itself shows whether a chunk
exists. A fetch under way for another request is joined; no chunk is requested twice.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from s3kv.host.table import Entry
from s3kv.messages import CopyPart
from s3kv.planning.deadline import Wait
from s3kv.planning.group_kinds import Coverage
from s3kv.planning.job import Job
from s3kv.planning.ledger import Ledger
from s3kv.planning.residency import Origin
from s3kv.types import ChunkKey

ORDERS_PER_LOOKUP = 32
"""Most fetches ordered in one lookup; the rest follow in the next steps. An order takes 3 to 5 µs
of the engine's scheduling thread. When a request arrives, its whole window is ordered at once:
otherwise the network would idle during engine steps, which may take hundreds of ms."""


def salted(block_hash: bytes, salt: bytes) -> bytes:
    """The hash under which a block or item is kept. salt: the last reset's; empty before any."""
    return blake2b(block_hash, key=salt, digest_size=32).digest() if salt else block_hash


@dataclass(slots=True, eq=False)
class ChunkHashes:
    """Chunk hashes of a request, taken from the engine's growing list of block hashes.

    stride: hash blocks per chunk. salt: key from which the hashes are derived, if not empty.
    """

    block_hashes: Sequence[bytes]
    stride: int
    salt: bytes
    known: list[bytes] = field(default_factory=list)
    """Hashes as of the last `read`."""
    resumable: int | None = None
    """Number of chunks that end before the request's last token; None if the caller does not give
    its number of tokens."""
    limit: int | None = None
    """Number of chunks from the start that may be loaded; None: all."""

    def read(self) -> list[bytes]:
        """Update and return `known`: the hashes of all chunks whose tokens are known by now."""
        known, stride = self.known, self.stride
        fresh = self.block_hashes[(len(known) + 1) * stride - 1 :: stride]
        if fresh:
            known += [salted(h, self.salt) for h in fresh] if self.salt else fresh
        return known

    def loadable(self) -> list[bytes]:
        """Update `known`, and return the hashes of the chunks that may be loaded."""
        known = self.read()
        return known if self.limit is None else known[: self.limit]

    @property
    def count(self) -> int:
        """Number of chunks that may be loaded, as of the last `read`."""
        return self._limited(len(self.known))

    @property
    def before_the_last(self) -> int:
        """Number of chunks that may be loaded and end before the last known token."""
        if self.resumable is None:
            return self._limited((len(self.block_hashes) - 1) // self.stride)
        return self._limited(min(self.resumable, len(self.block_hashes) // self.stride))

    def _limited(self, chunks: int) -> int:
        return chunks if self.limit is None else min(chunks, self.limit)


@dataclass(slots=True, eq=False)
class Lookup(ABC):
    """Lookup of a request in one coverage, with the chunks that the request leases or waits for.
    Same process, thread and clock as the planner. Positions and lengths are numbers of chunks, from
    the start of the prompt.

    Every call of `collect` leases resident chunks and requests missing ones, to let the request
    resume after `ready` chunks: as soon as possible, and after as many as possible, up to `limit`.
    If a resume after `ready` chunks turns out to be impossible, the next call, with that number as
    its `aim`, finds fewer. `fetch_ended` receives the end of every fetch that it has ordered or
    joined. After `stop` it requests and awaits nothing until it is reopened.

    planned: fetches for this step's plan, one list for all lookups. window: number of chunks not
    known to exist that may be requested at a time. aim: number of chunks that a resume may use, as
    of the last `collect`. Chunks `first … ready` are resident, and leased until the engine decides.
    asked: position before which no chunk has to be requested.
    """

    request_id: str
    ledger: Ledger
    coverage: Coverage
    hashes: ChunkHashes
    wait: Wait
    planned: list[Job]
    window: int
    is_open: bool = True
    """Whether it leases chunks that arrive. Otherwise its leases are offered or being loaded, or it
    has none, and later arrivals serve other requests."""
    aim: int = 0
    first: int = 0
    ready: int = 0
    asked: int = 0
    leases: list[Entry] = field(default_factory=list)
    """Leases of the chunks `first … ready`, or none."""
    early: dict[int, Entry] = field(default_factory=dict)
    """Leases of chunks after `ready`: they arrived before a chunk that is still missing."""
    pending: dict[int, Job] = field(default_factory=dict)
    """Fetches under way, by the position of the chunk."""
    probe: int | None = None
    """Position of the first chunk requested without being known to be in the bucket."""
    fetched: set[int] = field(default_factory=set)
    """Positions of chunks fetched from the bucket for this request, for the hit statistics."""
    has_more: bool = False
    """Whether the last `collect` stopped at its limit on orders."""

    @property
    @abstractmethod
    def waits(self) -> bool:
        """Whether a chunk in flight would extend `ready`."""

    @property
    @abstractmethod
    def limit(self) -> int:
        """Largest length at which a resume may still become possible."""

    @property
    @abstractmethod
    def secured(self) -> int:
        """Length that need not be computed, even if no chunk in flight arrives."""

    @property
    def unproven(self) -> int:
        """Number of the chunks before `limit` that the bucket may not have either, because it does
        not have the next one."""
        return 0

    @property
    def unasked(self) -> int:
        """Number of chunks that it has yet to request and that are expected to exist."""
        return 0

    @property
    def rounds(self) -> int:
        """Rounds of arrivals until it can request its last chunk."""
        return (self.unasked // self.window).bit_length()

    @property
    @abstractmethod
    def looks_ahead(self) -> bool:
        """Whether to request the chunks of a resume before its length is certain."""

    @abstractmethod
    def awaits(self, position: int) -> bool:
        """Whether it still needs the chunk at `position`."""

    @abstractmethod
    def collect(self, local_tokens: int, aim: int | None, now_s: float, orders: int) -> None:
        """Lease resident chunks, and order at most `orders` fetches. local_tokens: tokens in the
        engine's own cache. aim: largest length to resume at; None: all that may be loaded."""

    @abstractmethod
    def fetch_ended(self, position: int, job: Job, now_s: float) -> None:
        """Process the end of a fetch that this lookup has ordered or joined."""

    @abstractmethod
    def stop(self) -> None:
        """Make `ready` final."""

    def reopen(self) -> None:
        """Start over: the engine looks up a partly computed request again."""
        self.is_open = True
        self.fetched.clear()

    def key(self, position: int) -> ChunkKey:
        return ChunkKey(self.coverage.number, self.hashes.known[position])

    def awaited(self) -> list[Job]:
        """The fetches under way of chunks before `limit`."""
        limit = self.limit
        return [job for position, job in self.pending.items() if position < limit]

    def order(self, position: int, key: ChunkKey, now_s: float) -> Job | None:
        """Order the fetch of a chunk. None: there is no room, and the next lookup tries again."""
        if (job := self.ledger.plan_fetch(key, now_s)) is not None:
            self.planned.append(job)
            if (residency := self.ledger.residency) is not None:
                residency.append(Origin(key, self.request_id, position))
        return job

    def join(self, position: int, job: Job | None, now_s: float) -> bool:
        """Wait for the chunk at `position`. Returns False, and does nothing, without a job."""
        if job is not None:
            job.waiters.append((self, position))
            self.pending[position] = job
            self.wait.asked_s = now_s
        return job is not None

    def forget_fetches(self) -> list[Job]:
        """Stop waiting for all fetches under way. Returns their jobs."""
        dropped, self.pending = list(self.pending.values()), {}
        for job in dropped:
            job.waiters = [waiter for waiter in job.waiters if waiter[0] is not self]
        return dropped

    def lease_early(self, position: int, entry: Entry) -> None:
        """Keep a resident chunk until the ready ones reach it."""
        if position >= self.ready and position not in self.early:
            self.ledger.table.pin(entry)
            self.early[position] = entry

    def hold(self, chunks: int) -> None:
        """Keep only the leases of the ready chunks before `chunks`, for an offer."""
        self.is_open = False
        self.give_back_early()
        self.shorten(chunks)

    def shorten(self, chunks: int) -> None:
        """Give back the leases of the ready chunks from `chunks` on."""
        while self.leases and self.ready > chunks:
            self.ledger.table.unpin(self.leases.pop())
            self.ready -= 1

    def load_parts(
        self, tables: Sequence[Sequence[int]], begin_tokens: int, end_tokens: int
    ) -> Iterator[CopyPart]:
        """The parts of a load that fill the blocks from `begin_tokens` to `end_tokens`. tables: the
        request's blocks in every KV-cache group of the engine."""
        coverage, fits = self.coverage, end_tokens == self.ready * self.coverage.chunk_tokens
        assert fits or coverage.kind.is_cumulative, "what is ready fits one length"
        per_chunk, held = coverage.blocks_per_chunk, coverage.held.start
        needed = coverage.blocks_for(end_tokens)
        start, end = max(needed.start, begin_tokens // coverage.block_tokens), needed.stop
        for position in range(start // per_chunk, -(-end // per_chunk)):
            low, high = position * per_chunk, (position + 1) * per_chunk
            entry = self.leases[position - self.first]
            for member in coverage.members:
                blocks = tuple(tables[member][max(low, start) : min(high, end)])
                yield CopyPart(member, entry.number, max(low, start) - low - held, blocks)

    def close(self) -> None:
        """Give back all leases, and lease nothing more."""
        self.is_open = False
        self.give_back()

    def give_back(self) -> None:
        """Give back all leases. Only `collect` takes new ones."""
        for entry in self.leases:
            self.ledger.table.unpin(entry)
        self.leases.clear()
        self.ready = self.asked = self.first
        self.has_more = False
        self.give_back_early()

    def give_back_early(self) -> None:
        for entry in self.early.values():
            self.ledger.table.unpin(entry)
        self.early.clear()
