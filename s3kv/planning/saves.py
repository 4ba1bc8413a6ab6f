"""Saves of a step: the chunks of a request that are complete after it, and worth a place. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, product

from s3kv.planning.group_kinds import Coverage
from s3kv.planning.job import Job
from s3kv.planning.ledger import ChunkState, Ledger
from s3kv.planning.requests import PlannedRequest, ScheduledRequest
from s3kv.planning.residency import Origin
from s3kv.types import ChunkKey

_KEPT = (ChunkState.RESIDENT, ChunkState.COPYING)


class ChunkSaves:
    """Saves of one engine's requests. max_saves_inflight: most saves under way at a time.

    null_block: the engine's number for "no block" in its tables; None if they have no gaps.
    """

    def __init__(
        self,
        ledger: Ledger,
        coverages: Sequence[Coverage],
        *,
        max_saves_inflight: int,
        null_block: int | None,
    ) -> None:
        self._ledger = ledger
        self._coverages = coverages
        self._chunk_tokens = coverages[0].chunk_tokens
        self._max_saves_inflight = max_saves_inflight
        self._null_block = null_block
        self._doubtful: set[int] = set()
        """Blocks that another connector has loaded within a step. The engine shares them at once,
        but may find them invalid only after that step's saves have been uploaded."""

    def doubt(self, blocks: Iterable[int]) -> bool:
        """Bar saves of requests with any of these blocks, which another connector loads. Returns
        whether any block is doubtful."""
        self._doubtful.update(blocks)
        self._doubtful.discard(self._null_block)
        return bool(self._doubtful)

    def written(self, blocks: Iterable[int]) -> None:
        """Trust these blocks, which s3kv loads or the engine computes."""
        if self._doubtful:
            self._doubtful.difference_update(blocks)

    def plan(self, request: PlannedRequest, step: ScheduledRequest, now_s: float) -> Sequence[Job]:
        """Plan to save the chunks that are complete after this step, have a hash, and may be saved.

        Only known tokens have hashes, so drafts that may be rejected are never saved.
        """
        doubtful = self._doubtful
        if doubtful and step.replaces and not doubtful.isdisjoint(chain(*step.block_ids)):
            request.saving.is_barred = True
        saving, size = request.saving, self._chunk_tokens
        tokens = step.computed_tokens + step.scheduled_tokens
        # This is the case in nearly every decode step.
        if tokens < (saving.saved + 1) * size:
            return ()
        chunks = saving.take(min(saving.allowed(tokens // size), len(request.hashes.read())))
        if not chunks:
            return ()
        tables = saving.block_ids if step.tables is None else step.tables()
        resumable, computed = request.hashes.resumable, step.computed_tokens
        last = None if resumable is None else resumable * size
        jobs = []
        for position, coverage in product(chunks, self._coverages):
            end = (position + 1) * size
            if coverage.kind.is_saved(end, computed, step.scheduled_tokens, step.states, last):
                jobs.append(self._save(request, coverage, position, tables, step, now_s))
        return [job for job in jobs if job is not None]

    def _save(
        self,
        request: PlannedRequest,
        coverage: Coverage,
        position: int,
        tables: Sequence[Sequence[int]],
        step: ScheduledRequest,
        now_s: float,
    ) -> Job | None:
        ledger = self._ledger
        key = ChunkKey(coverage.number, request.hashes.known[position])
        state = ledger.state(key)
        ledger.index.use(key, now_s)  # perhaps no lookup has queried the bucket
        if state is ChunkState.RESIDENT:
            ledger.unsaved.hit(key)
        if state in _KEPT:
            return None
        # A later step is too late for a chunk in flight: there may be none, or the blocks may be
        # gone. The I/O process uploads it only if the bucket turns out to lack it.
        if ledger.index.is_present(key):
            if state is ChunkState.FETCHING:
                ledger.fetch_job(key).is_computed = True
            return None
        if request.saving.is_barred:  # its tables may be unknown
            ledger.counters["saves_dropped"] += 1
            ledger.counters["saves_doubtful"] += 1
            return None
        held, members = coverage.blocks_of(position), coverage.members
        blocks = tuple(
            chain.from_iterable(tables[member][held.start : held.stop] for member in members)
        )
        if self._null_block in blocks or len(blocks) != len(held) * len(members):
            # The engine has given up a block that the object needs.
            if (position + 1) * self._chunk_tokens > step.computed_tokens:
                ledger.counters["saves_dropped"] += 1
                ledger.counters["saves_without_blocks"] += 1
            return None
        full = ledger.saves_inflight >= self._max_saves_inflight
        job = None if full else ledger.plan_save(key, blocks)
        if job is None:
            ledger.counters["saves_dropped"] += 1
        elif ledger.residency is not None:
            ledger.residency.append(Origin(key, request.request_id, position))
        return job
