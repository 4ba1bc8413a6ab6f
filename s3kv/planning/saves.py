"""Saves of a step: the chunks of a request that are complete after it, and worth a place. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

from s3kv.messages import JobKind
from s3kv.planning.cover import GroupKind, GroupSpec, blocks_of_chunk, cover
from s3kv.planning.ledger import ChunkState, Ledger
from s3kv.planning.requests import PlannedRequest, ScheduledRequest
from s3kv.types import ChunkKey

_KEPT = (ChunkState.RESIDENT, ChunkState.COPYING)


class ChunkSaves:
    """Saves of one engine's requests. max_saves_inflight: most saves under way at a time.

    null_block: the engine's number for "no block" in its tables; None if they have no gaps.
    """

    def __init__(
        self,
        ledger: Ledger,
        groups: Sequence[GroupSpec],
        *,
        max_saves_inflight: int,
        null_block: int | None,
    ) -> None:
        self._ledger = ledger
        self._groups = groups
        self._chunk_tokens = groups[0].chunk_tokens
        self._max_saves_inflight = max_saves_inflight
        self._null_block = null_block
        self._doubtful: set[int] = set()
        """Blocks that another connector has loaded within a step. The engine shares them at once,
        but may learn that they are wrong only after that step's saves have been uploaded."""

    def doubt(self, blocks: Iterable[int]) -> None:
        """Save nothing of requests with any of these blocks, which another connector loads."""
        self._doubtful.update(blocks)
        self._doubtful.discard(self._null_block)

    def written(self, blocks: Iterable[int]) -> None:
        """Trust these blocks, which s3kv loads or the engine computes."""
        if self._doubtful:
            self._doubtful.difference_update(blocks)

    def plan(self, request: PlannedRequest, step: ScheduledRequest) -> None:
        """Save the chunks that are complete after this step, have a hash, and may be saved.

        Only known tokens have hashes, so drafts that may be rejected are never saved.
        """
        doubtful = self._doubtful
        if doubtful and step.replaces and not doubtful.isdisjoint(chain(*step.block_ids)):
            request.saving.is_barred = True
        saving, size = request.saving, self._chunk_tokens
        tokens = step.computed_tokens + step.scheduled_tokens
        # So it is in nearly every step of a request that decodes.
        if tokens < (saving.saved + 1) * size:
            return
        complete = saving.allowed(tokens // size)
        if saving.is_barred or complete <= saving.saved:
            return
        complete = min(complete, len(request.hashes.read()))
        chunks = saving.take(complete)
        if not chunks:
            return
        tables = saving.block_ids if step.tables is None else step.tables()
        for number, position in chunks:
            if self._is_needed(self._groups[number], position, request, step):
                self._save(request, number, position, tables, step)

    def _is_needed(
        self, group: GroupSpec, position: int, request: PlannedRequest, step: ScheduledRequest
    ) -> bool:
        """Whether a resume at the chunk's end needs anything of the group; of states, whether it is
        there and worth its bytes."""
        if group.kind is GroupKind.FULL:
            return True
        end = (position + 1) * group.chunk_tokens
        if group.kind is GroupKind.STATE:
            return (
                _has_state(end, step)
                and request.hashes.may_resume(position + 1)
                and _is_worth_saving(end, step, group, request.hashes.resumable)
            )
        return bool(cover(group, end).blocks)

    def _save(
        self,
        request: PlannedRequest,
        number: int,
        position: int,
        tables: Sequence[Sequence[int]],
        step: ScheduledRequest,
    ) -> None:
        group, ledger = self._groups[number], self._ledger
        key = ChunkKey(group.number, request.hashes.known[position])
        state = ledger.state(key)
        if state is ChunkState.RESIDENT:
            ledger.unsaved.hit(key)
        if state in _KEPT:
            return
        # A later step is too late for a chunk that is on its way: the request may have none, or no
        # longer the blocks. The I/O process uploads it only if the bucket turns out to lack it.
        if ledger.index.is_present(key):
            if state is ChunkState.FETCHING:
                ledger.fetch_job(key).is_computed = True
            return
        held = blocks_of_chunk(group, position)
        blocks = tuple(
            chain.from_iterable(tables[member][held.start : held.stop] for member in group.members)
        )
        if self._null_block in blocks or len(blocks) != len(held) * len(group.members):
            # The engine has given up a block that the object needs.
            if (position + 1) * self._chunk_tokens > step.computed_tokens:
                ledger.counters["saves_dropped"] += 1
                ledger.counters["saves_without_blocks"] += 1
            return
        full = ledger.saves_inflight >= self._max_saves_inflight
        if full or not ledger.plan_save(key, blocks):
            ledger.counters["saves_dropped"] += 1
        elif ledger.residency is not None:
            ledger.residency.origin(key, JobKind.SAVE, request.request_id, position)


def _has_state(tokens: int, step: ScheduledRequest) -> bool:
    """Whether a block holds the state after so many tokens once the step has run. A step writes one
    state, at its end; the next one writes to another block, if this one is full."""
    begin = step.computed_tokens
    return tokens in (begin, begin + step.scheduled_tokens) or tokens in step.states


def _is_worth_saving(
    tokens: int, step: ScheduledRequest, group: GroupSpec, resumable: int | None
) -> bool:
    """Whether to save a state that is there: the prompt's last, the first after a multiple of the
    interval, or one that the engine keeps itself, because it says so or the step began there.

    resumable: chunks that the prompt can resume after; None: it is not known.
    """
    begin = step.computed_tokens
    if tokens != begin + step.scheduled_tokens or tokens in step.states:
        return True
    is_last = resumable is None or tokens == resumable * group.chunk_tokens
    return is_last or tokens // group.interval_tokens > begin // group.interval_tokens
