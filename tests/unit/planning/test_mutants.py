"""Planners with one rule taken out. Random lives have to notice every one of them; what those find
only in long runs, an example does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from lab.books import CHECKS
from s3kv.host.table import Entry, EntryState, Table
from s3kv.messages import CopyPart, JobEnd
from s3kv.planning import deadline, saves
from s3kv.planning.breaker import Breaker
from s3kv.planning.group_kinds import Coverage, GroupKind, States
from s3kv.planning.index import BucketIndex
from s3kv.planning.job import Job
from s3kv.planning.kv import KVPlanner
from s3kv.planning.ledger import ChunkState, Ledger
from s3kv.planning.lookup import ChunkHashes, Lookup
from s3kv.planning.prefix_lookup import PrefixLookup
from s3kv.planning.requests import NO_LIMITS, Answer, PlannedRequest, Saving, ScheduledRequest
from s3kv.planning.saves import ChunkSaves
from s3kv.planning.uploads import Unsaved
from s3kv.types import ChunkKey
from tests.mutants import Mutant, Mutants, Patch
from tests.nightly import some_by_day
from tests.unit.planning import test_ledger, test_saves
from tests.unit.planning.oracle import FINDINGS

CASES: list[tuple[Mutants, Callable[[], object]]] = []

offer = KVPlanner._offer
save = ChunkSaves.plan
finished = KVPlanner.finished
admitted = KVPlanner.admitted
loaded = KVPlanner.loaded
reset = KVPlanner.reset
load_parts = Lookup.load_parts
collect = PrefixLookup.collect
collect_groups = PlannedRequest.collect
save_chunk = ChunkSaves._save
give_back = Lookup.give_back
on_end = Ledger.on_end
plan_save = Ledger.plan_save
place = Saving.place
start_over = PlannedRequest.start_over
take = Unsaved.take
mark_clean = Table.mark_clean


def mark_clean_once(self: Table, entry: Entry) -> None:
    if entry.state is EntryState.DIRTY:
        mark_clean(self, entry)


def noticed_by(test: Callable[[], object]) -> Mutants:
    CASES.append((mutants := Mutants(), test))
    return mutants


MUTANTS, LIVES, FLEETS = Mutants(), Mutants(), Mutants()
"""Noticed by lives under vLLM's scheduler (`tests/contract/test_scheduling.py`) and by fleets
(`tests/system/sim`); by the first alone; by the second alone."""
mutant, instead_of, swap = MUTANTS.mutant, MUTANTS.instead_of, MUTANTS.swap

swap("forgets_to_unpin", Lookup, "give_back_early", lambda self: self.early.clear())
swap("fences_nothing", Ledger, "fences", lambda self, block_ids: set())
LIVES.swap("forgets_what_the_bucket_has", BucketIndex, "is_present", lambda self, key: False)
LIVES.swap("saves_what_a_request_keeps_private", Saving, "allowed", lambda self, chunks: chunks)
swap("waits_for_ever", deadline, "decide", lambda facts: float("inf"))
noticed_by(test_ledger.test_after_a_long_outage_a_hit_uploads_what_was_given_up).swap(
    "never_uploads_again_what_was_given_up", Unsaved, "hit", lambda self, key: None
)
noticed_by(test_ledger.test_while_the_outage_goes_on_hits_upload_less_and_less_often).swap(
    "uploads_again_as_often_as_it_is_hit", Unsaved, "saw", lambda self, outcome, now_s: None
)


@mutant
def does_not_keep_what_it_offers(patch: Patch) -> None:
    def stingy(self: KVPlanner, request: PlannedRequest) -> Answer:
        answer = offer(self, request)
        for slot in request.lookups[0].leases:
            self.ledger.table.unpin(slot)
        return answer

    patch.setattr(KVPlanner, "_offer", stingy)
    patch.setitem(CHECKS, KVPlanner, lambda of: None)


@instead_of(Ledger, "on_end")
def takes_the_first_rank_for_all(self: Ledger, end: JobEnd, now_s: float) -> Job | None:
    job = self._jobs.get(end.job_id)
    if job is None or not job.reports_left[end.kind]:
        return None
    job.reports_left[end.kind] = end.ranks
    return on_end(self, end, now_s)


@instead_of(KVPlanner, "admitted")
def does_not_fence_loads(
    self: KVPlanner, request_id: str, block_ids: Sequence[Sequence[int]], tokens: int
) -> None:
    fences = set(self._fences)
    admitted(self, request_id, block_ids, tokens)
    self._fences = fences


@mutant
def offers_what_is_on_its_way(patch: Patch) -> None:
    def eager(self: PrefixLookup, *args: Any) -> None:
        collect(self, *args)
        while (job := self.pending.get(self.ready)) is not None:
            self.leases.append(job.entry)
            self.ready += 1

    patch.setattr(PrefixLookup, "collect", eager)
    patch.setitem(CHECKS, KVPlanner, lambda of: None)


@instead_of(ChunkSaves, "plan")
def saves_chunks_that_are_not_complete(
    self: ChunkSaves, request: PlannedRequest, step: ScheduledRequest, now_s: float
) -> Sequence[Job]:
    return save(self, request, step._replace(scheduled_tokens=step.scheduled_tokens + 1), now_s)


@FLEETS.mutant
def loses_what_is_computed_while_it_is_fetched(patch: Patch) -> None:
    patch.setattr(saves, "_KEPT", (ChunkState.RESIDENT, ChunkState.COPYING, ChunkState.FETCHING))


@LIVES.instead_of(PlannedRequest, "start_over")
def forgets_the_limits_of_a_request_that_is_preempted(self: PlannedRequest) -> None:
    self.limits, self.saving.limit = NO_LIMITS, None
    start_over(self)


@LIVES.mutant
def loads_more_than_a_request_allows(patch: Patch) -> None:
    patch.setattr(ChunkHashes, "loadable", ChunkHashes.read)
    patch.setattr(ChunkHashes, "count", property(lambda self: len(self.known)))


@instead_of(Ledger, "plan_save")
def saves_blocks_in_the_wrong_order(
    self: Ledger, key: ChunkKey, block_ids: tuple[int, ...]
) -> Job | None:
    return plan_save(self, key, block_ids[::-1])


@instead_of(Lookup, "load_parts")
def loads_from_the_start_of_a_chunk(self: Lookup, *args: Any) -> Iterator[CopyPart]:
    for part in load_parts(self, *args):
        yield CopyPart(part.group, part.slot, 0, part.block_ids)


@LIVES.instead_of(KVPlanner, "finished")
def drops_the_chunks_of_a_load_with_its_request(self: KVPlanner, request_id: str) -> None:
    finished(self, request_id)
    orphan = self._orphans.pop(request_id, None)
    if orphan is not None:
        orphan.close()


@instead_of(KVPlanner, "loaded")
def leaks_the_chunks_of_a_load_whose_request_is_gone(
    self: KVPlanner, request_ids: Iterable[str], failed: Any = ()
) -> None:
    loaded(self, [r for r in request_ids if r in self._requests], failed)


@instead_of(KVPlanner, "loaded")
def offers_again_what_failed_to_load(
    self: KVPlanner, request_ids: Iterable[str], failed: Any = ()
) -> None:
    loaded(self, request_ids)


@LIVES.instead_of(Lookup, "give_back")
def remembers_what_was_ready_before_it_gave_it_back(self: Lookup) -> None:
    ready, leases = self.ready, [*self.leases]
    give_back(self)
    self.ready, self.leases = ready, leases


@instead_of(KVPlanner, "reset")
def resets_without_a_new_salt(self: KVPlanner, salt: bytes) -> None:
    reset(self, self._salt)


@instead_of(KVPlanner, "reset")
def lets_requests_from_before_a_reset_go_on(self: KVPlanner, salt: bytes) -> None:
    self._salt = salt
    self.ledger.index.forget()
    for request in self._requests.values():
        request.hashes.salt = salt
        request.hashes.known.clear()


@mutant
def frees_the_slot_of_a_cancelled_fetch_at_once(patch: Patch) -> None:
    def hasty(self: KVPlanner, request_id: str) -> None:
        finished(self, request_id)
        for job_id, job in self._unwanted.items():
            if not job.waiters and job_id in self.ledger._jobs:
                del self.ledger._jobs[job_id]
                del self.ledger._job_of[job.key]
                self.ledger.fetches_inflight -= 1
                self.ledger.table.abandon(job.entry)

    def forgiving(self: Ledger, end: JobEnd, now_s: float) -> Job | None:
        return on_end(self, end, now_s) if end.job_id in self._jobs else None

    patch.setattr(KVPlanner, "finished", hasty)
    patch.setattr(Ledger, "on_end", forgiving)


@noticed_by(test_ledger.test_after_a_long_outage_a_hit_uploads_what_was_given_up).mutant
def uploads_again_from_a_slot_that_may_be_evicted(patch: Patch) -> None:
    patch.setattr(Table, "mark_dirty", lambda self, entry: None)
    patch.setattr(Table, "mark_clean", mark_clean_once)
    patch.setitem(CHECKS, Ledger, lambda of: None)


@noticed_by(test_ledger.test_a_store_that_is_back_is_not_stormed).instead_of(Unsaved, "take")
def uploads_again_however_many_are_on_their_way(
    self: Unsaved, most: int, store: Breaker, now_s: float
) -> list[ChunkKey]:
    return take(self, 1_000, store, now_s)


noticed_by(test_saves.test_a_state_is_saved_where_a_step_ends_with_a_chunk).swap(
    "takes_a_full_block_for_a_state", States, "is_saved", GroupKind.is_saved
)


@LIVES.instead_of(KVPlanner, "_fences_behind")
def fences_the_first_group_alone(
    self: KVPlanner, tokens: int, block_ids: Sequence[Sequence[int]]
) -> set[int]:
    return self.ledger.fences(block_ids[0])


@noticed_by(test_saves.test_the_table_of_the_step_counts_and_not_what_the_steps_add_up_to).mutant
def believes_that_tables_only_grow(patch: Patch) -> None:
    def grown(self: Saving, step: ScheduledRequest) -> None:
        place(self, step._replace(tables=None))

    def known(
        self: ChunkSaves, request: PlannedRequest, step: ScheduledRequest, now_s: float
    ) -> Sequence[Job]:
        return save(self, request, step._replace(tables=None), now_s)

    patch.setattr(Saving, "place", grown)
    patch.setattr(ChunkSaves, "plan", known)


@LIVES.instead_of(ChunkSaves, "plan")
def saves_no_block_as_if_it_were_one(
    self: ChunkSaves, request: PlannedRequest, step: ScheduledRequest, now_s: float
) -> Sequence[Job]:
    self._null_block = None
    return save(self, request, step, now_s)


@LIVES.instead_of(ChunkSaves, "_save")
def saves_the_parts_of_a_chunk_in_another_order(
    self: ChunkSaves, request: PlannedRequest, coverage: Coverage, *args: Any
) -> Any:
    return save_chunk(self, request, replace(coverage, members=coverage.members[::-1]), *args)


@LIVES.instead_of(PlannedRequest, "collect")
def offers_what_the_first_group_has(
    self: PlannedRequest, now_s: float, orders: int
) -> Lookup | None:
    awaited = collect_groups(self, now_s, orders)
    self.ready = max(self.ready, self.lookups[0].ready)
    return awaited


@LIVES.mutant
def offers_the_last_token(patch: Patch) -> None:
    patch.setattr(ChunkHashes, "before_the_last", property(lambda self: len(self.known)))


@LIVES.instead_of(Lookup, "load_parts")
def takes_a_window_for_a_whole_chunk(self: Lookup, *args: Any) -> Iterator[CopyPart]:
    for part in load_parts(self, *args):
        yield replace(part, first_block=part.first_block + self.coverage.held.start)


@pytest.mark.parametrize(
    ("mutate", "check"),
    some_by_day([(mutate, test) for mutants, test in CASES for mutate in mutants], 10),
)
def test_it_is_noticed_that_a_planner(
    mutate: Mutant, check: Callable[[], object], monkeypatch: Patch
) -> None:
    mutate(monkeypatch)
    with pytest.raises(FINDINGS):
        check()
