"""Planners with one rule taken out. The state machine has to notice every one of them; what it
finds only in long runs, an example does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from s3kv.host.slots import SlotError
from s3kv.messages import JobEnd, LoadPart
from s3kv.planning import kv
from s3kv.planning.index import BucketIndex
from s3kv.planning.kv import Answer, KVPlanner
from s3kv.planning.ledger import ChunkLedger, Job
from s3kv.planning.prefix import PrefixCollector
from s3kv.planning.requests import RequestRecord
from s3kv.types import ChunkKey
from tests.planning.machine import run
from tests.planning.test_leases import (
    test_a_request_that_finishes_while_loading_keeps_its_chunks_until_the_load_ends as finishing,
)
from tests.planning.test_saving import (
    test_after_a_preemption_an_undecided_chunk_has_to_be_computed_again_first as preempted,
)

Patch = pytest.MonkeyPatch
MUTANTS: list[tuple[Callable[[Patch], None], Callable[[], object]]] = []

offer = KVPlanner._offer
save = KVPlanner._save
finished = KVPlanner.finished
admitted = KVPlanner.admitted
loaded = KVPlanner.loaded
load_parts = KVPlanner._load_parts
collect = PrefixCollector.collect
release = PrefixCollector.release
on_end = ChunkLedger.on_end
plan_save = ChunkLedger.plan_save


def by_machine() -> None:
    # Most are noticed within a hundred; what Hypothesis generates differs between its versions.
    run(examples=1_500)


def mutant(of: Callable[[Patch], None]) -> Callable[[Patch], None]:
    MUTANTS.append((of, by_machine))
    return of


def mutant_for(test: Callable[[], object]) -> Callable[[Callable[[Patch], None]], None]:
    return lambda of: MUTANTS.append((of, test))


@mutant
def forgets_to_unpin(patch: Patch) -> None:
    patch.setattr(PrefixCollector, "release_early", lambda self, record: record.early.clear())


@mutant
def does_not_keep_what_it_offers(patch: Patch) -> None:
    def stingy(self: KVPlanner, record: RequestRecord) -> Answer:
        answer = offer(self, record)
        for slot in record.prefix:
            self.ledger.slots.unpin(slot)
        return answer

    patch.setattr(KVPlanner, "_offer", stingy)
    patch.setattr(KVPlanner, "check", lambda self: None)


@mutant
def takes_the_first_rank_for_all(patch: Patch) -> None:
    def hasty(self: ChunkLedger, end: JobEnd, now_s: float) -> Job | None:
        job = self._jobs.get(end.job_id)
        if job is None or not job.ranks_left[end.kind]:
            return None
        job.ranks_left[end.kind] = end.ranks
        return on_end(self, end, now_s)

    patch.setattr(ChunkLedger, "on_end", hasty)


@mutant
def fences_nothing(patch: Patch) -> None:
    patch.setattr(ChunkLedger, "fences", lambda self, block_ids: set())


@mutant
def does_not_fence_loads(patch: Patch) -> None:
    def careless(self: KVPlanner, request_id: str, block_ids: Sequence[int], tokens: int) -> None:
        fences = set(self._fences)
        admitted(self, request_id, block_ids, tokens)
        self._fences = fences

    patch.setattr(KVPlanner, "admitted", careless)


@mutant
def forgets_what_the_bucket_has(patch: Patch) -> None:
    patch.setattr(BucketIndex, "is_present", lambda self, key: False)


@mutant
def offers_what_is_on_its_way(patch: Patch) -> None:
    def eager(
        self: PrefixCollector, record: RequestRecord, local_tokens: int, now_s: float
    ) -> None:
        collect(self, record, local_tokens, now_s)
        record.ready = record.asked

    patch.setattr(PrefixCollector, "collect", eager)


@mutant
def saves_chunks_that_are_not_complete(patch: Patch) -> None:
    def early(self: KVPlanner, record: RequestRecord, computed_tokens: int) -> None:
        save(self, record, computed_tokens + 1)

    patch.setattr(KVPlanner, "_save", early)


@mutant_for(preempted)
def saves_undecided_chunks_before_they_are_computed_again(patch: Patch) -> None:
    def early(self: KVPlanner, record: RequestRecord, computed_tokens: int) -> None:
        if record.undecided:
            size = self._settings.chunk_tokens
            computed_tokens = max(computed_tokens, size * (max(record.undecided) + 1))
        save(self, record, computed_tokens)

    patch.setattr(KVPlanner, "_save", early)


@mutant
def saves_blocks_in_the_wrong_order(patch: Patch) -> None:
    def turned(self: ChunkLedger, key: ChunkKey, block_ids: tuple[int, ...]) -> bool:
        return plan_save(self, key, block_ids[::-1])

    patch.setattr(ChunkLedger, "plan_save", turned)


@mutant
def loads_from_the_start_of_a_chunk(patch: Patch) -> None:
    def coarse(self: KVPlanner, *args: Any) -> tuple[LoadPart, ...]:
        parts = load_parts(self, *args)
        return tuple(LoadPart(part.group, part.slot, 0, part.block_ids) for part in parts)

    patch.setattr(KVPlanner, "_load_parts", coarse)


@mutant_for(finishing)
def drops_the_chunks_of_a_load_with_its_request(patch: Patch) -> None:
    def hard(self: KVPlanner, request_id: str) -> None:
        finished(self, request_id)
        orphan = self._orphans.pop(request_id, None)
        if orphan is not None:
            self._prefix.release(orphan)

    patch.setattr(KVPlanner, "finished", hard)


@mutant
def leaks_the_chunks_of_a_load_whose_request_is_gone(patch: Patch) -> None:
    def blind(self: KVPlanner, request_ids: Iterable[str], failed: Iterable[str] = ()) -> None:
        loaded(self, [r for r in request_ids if r in self._requests], failed)

    patch.setattr(KVPlanner, "loaded", blind)


@mutant
def offers_again_what_failed_to_load(patch: Patch) -> None:
    def trusting(self: KVPlanner, request_ids: Iterable[str], failed: Iterable[str] = ()) -> None:
        loaded(self, request_ids)

    patch.setattr(KVPlanner, "loaded", trusting)


@mutant
def remembers_what_was_ready_before_it_gave_it_back(patch: Patch) -> None:
    def stale(self: PrefixCollector, record: RequestRecord) -> None:
        ready = record.ready
        release(self, record)
        record.ready = ready

    patch.setattr(PrefixCollector, "release", stale)


@mutant
def waits_for_ever(patch: Patch) -> None:
    patch.setattr(kv, "wait_until_s", lambda *args, **kwargs: float("inf"))


@mutant
def resets_without_a_new_salt(patch: Patch) -> None:
    patch.setattr(PrefixCollector, "reset", lambda self, salt: None)


@mutant
def lets_requests_from_before_a_reset_go_on(patch: Patch) -> None:
    def lax(self: KVPlanner, salt: bytes) -> None:
        self._prefix.reset(salt)
        self.ledger.index.forget()
        for record in self._requests.values():
            record.hashes.clear()

    patch.setattr(KVPlanner, "reset", lax)


@mutant
def frees_the_slot_of_a_cancelled_fetch_at_once(patch: Patch) -> None:
    def hasty(self: KVPlanner, request_id: str) -> None:
        finished(self, request_id)
        for job_id, job in self._unwanted.items():
            if not job.waiters and job_id in self.ledger._jobs:
                del self.ledger._jobs[job_id]
                del self.ledger._job_of[job.key]
                self.ledger._fetches_inflight -= 1
                self.ledger.slots.abandon(job.slot)

    patch.setattr(KVPlanner, "finished", hasty)


@pytest.mark.parametrize(
    ("mutate", "check"), [pytest.param(*both, id=both[0].__name__) for both in MUTANTS]
)
def test_it_is_noticed_that_a_planner(
    mutate: Callable[[Patch], None], check: Callable[[], object], monkeypatch: Patch
) -> None:
    mutate(monkeypatch)
    with pytest.raises((AssertionError, SlotError, LookupError)):
        check()
