"""Uses above the bucket: when it is asked about them, and what becomes of its answers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import pytest

from lab.books import check
from s3kv.messages import BucketJob, ItemReport, JobEnd, JobKind, StepPlan, StepReport
from s3kv.planning.index import ASK_AGAIN_S
from s3kv.planning.requests import RequestLimits
from s3kv.planning.residency import Change, Residency
from s3kv.types import Outcome
from tests.plans import uploads_of, uses_of
from tests.unit.planning import ec_desk
from tests.unit.planning.desk import CHUNK, Desk

FRESH_S = 100.0
EXISTS, MISSING = Outcome.EXISTS, Outcome.MISSING


def resident(prompt: str = "aaaa", **setup: object) -> Desk:
    """All chunks of the prompt have been fetched, and are not due before `FRESH_S`."""
    desk = Desk(**setup)
    desk.add("first", prompt)
    while desk.lookup("first").wait:
        answer(desk, [f.job_id for f in desk.fetches()], Outcome.OK, JobKind.FETCH)
    desk.planner.finished("first")
    desk.plan()
    return desk


def answer(
    desk: Desk, jobs: Iterable[int], outcome: Outcome, kind: JobKind = JobKind.USE, ranks: int = 0
) -> None:
    report = StepReport()
    count = ranks or desk.setup.world_size
    for job in jobs:
        report.add(JobEnd(job, kind, outcome, 0, 0.0, count, fresh_s=FRESH_S))
    desk.planner.on_report(report, desk.now_s)
    check(desk.planner)


def in_host_memory(desk: Desk, name: str, prompt: str = "aaaa") -> StepPlan:
    """A request whose chunks are loaded from host memory."""
    tokens = len(prompt) // CHUNK * CHUNK
    assert desk.ask(name, prompt + "z").tokens == tokens
    desk.admit(name, range(tokens // 2 + 1), tokens)
    loading = desk.plan()
    assert loading.loads
    assert not uses_of(loading), "they are not used before they are there"
    desk.planner.loaded([name])
    return desk.run(name, range(tokens // 2 + 1), tokens, 1, new=True)


def test_nothing_is_sent_for_a_request_that_neither_saves_nor_loads() -> None:
    desk = resident()
    desk.now_s = 2 * FRESH_S
    desk.add("private", "aaaaz", RequestLimits(0, 0))
    desk.admit("private")
    assert not desk.run("private", range(3), CHUNK, 1, new=True).jobs
    assert in_own_cache(desk, "another").jobs


def in_own_cache(desk: Desk, name: str, prompt: str = "aaaa") -> StepPlan:
    """A request whose chunks the engine's own cache holds."""
    tokens = len(prompt) // CHUNK * CHUNK
    desk.add(name, prompt + "z")
    desk.lookup(name, tokens)
    desk.admit(name)
    return desk.run(name, range(tokens // 2 + 1), tokens, 1, new=True)


def computed_again(desk: Desk, name: str, prompt: str = "aaaa") -> StepPlan:
    """A request that computes its chunks and has not looked for them."""
    return desk.compute(name, prompt, range(len(prompt) // 2), 0, len(prompt))


def ids(uses: Iterable[BucketJob]) -> list[int]:
    return [use.job_id for use in uses]


@pytest.mark.parametrize("use", [in_host_memory, in_own_cache, computed_again])
def test_what_is_used_above_the_bucket_is_asked_for_once_it_is_due(
    use: Callable[[Desk, str], StepPlan],
) -> None:
    desk = resident()
    desk.now_s = FRESH_S - 1.0
    assert uses_of(use(desk, "early")) == ()
    desk.now_s = FRESH_S
    uses = uses_of(use(desk, "due"))
    assert desk.keys(uses) == [desk.key("aaaa")]  # type: ignore[arg-type]
    assert uses_of(use(desk, "again")) == (), "once is enough"
    answer(desk, ids(uses), EXISTS)
    desk.now_s += FRESH_S - 1.0
    assert uses_of(use(desk, "early again")) == ()
    desk.now_s += 1.0
    assert len(uses_of(use(desk, "due again"))) == 1


def test_what_is_not_known_to_be_in_the_bucket_is_not_asked_for() -> None:
    desk = Desk()
    desk.now_s = 1e6
    assert uses_of(in_own_cache(desk, "r")) == ()


def test_a_request_that_may_not_be_saved_counts_as_well() -> None:
    desk = resident(may_save=False)
    desk.now_s = FRESH_S
    (use,) = uses_of(in_host_memory(desk, "r"))
    answer(desk, [use.job_id], MISSING)
    assert desk.uploads() == (), "who may not save does not upload"


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.CANCELLED, Outcome.DENIED])
def test_without_an_answer_it_is_asked_for_again_after_a_while(outcome: Outcome) -> None:
    desk = resident()
    desk.now_s = FRESH_S
    answer(desk, ids(uses_of(in_own_cache(desk, "r"))), outcome)
    desk.now_s += ASK_AGAIN_S - 1.0
    assert uses_of(in_own_cache(desk, "early")) == ()
    desk.now_s += 1.0
    assert len(uses_of(in_own_cache(desk, "late"))) == 1


def test_of_a_long_prompt_few_chunks_are_asked_for_in_one_step() -> None:
    prompt = "".join(letter * CHUNK for letter in "abcdefghij")
    desk = resident(prompt, slots=32, blocks=64)
    desk.now_s = FRESH_S
    asked = []
    for number in range(4):
        uses = uses_of(in_own_cache(desk, f"r{number}", prompt))
        assert len(uses) <= 4
        asked += desk.keys(uses)
    assert len(asked) == len(set(asked)) == 10


def test_what_is_resident_and_gone_from_the_bucket_is_uploaded_again() -> None:
    desk = resident()
    desk.now_s = FRESH_S
    (use,) = uses_of(in_host_memory(desk, "r"))
    residency = desk.planner.ledger.residency
    residency.take()
    answer(desk, [use.job_id], MISSING)
    assert residency.take() == [Change(use.key, Residency.BUCKET_REMOVED)]
    (upload,) = desk.uploads()
    assert upload.key == use.key
    answer(desk, [upload.job_id], Outcome.OK, JobKind.UPLOAD)
    assert desk.planner.ledger.index.verdict(use.key, desk.now_s) is True


def test_what_only_the_engine_has_is_saved_by_the_next_request_that_runs_over_it() -> None:
    desk = resident(slots=1)
    desk.now_s = FRESH_S
    desk.make_resident("bbbb")  # takes the only slot
    answer(desk, ids(uses_of(in_own_cache(desk, "r"))), MISSING)
    desk.now_s += 30.0
    assert desk.keys(in_own_cache(desk, "next").saves) == [desk.key("aaaa")]


def test_who_does_not_load_learns_as_well_what_the_bucket_has_lost() -> None:
    desk = Desk(may_load=False, slots=1)
    for prompt in ["aaaa", "bbbb"]:  # the second takes the only slot
        (save,) = computed_again(desk, prompt, prompt).saves
        desk.copied(save)
        answer(desk, [save.job_id], Outcome.OK, JobKind.UPLOAD)
    desk.now_s = FRESH_S
    answer(desk, ids(uses_of(computed_again(desk, "r"))), MISSING)
    assert desk.keys(computed_again(desk, "next").saves) == [desk.key("aaaa")]


def test_one_rank_without_it_is_enough() -> None:
    for first, second in [(EXISTS, MISSING), (MISSING, EXISTS)]:
        desk = resident(world_size=2)
        desk.now_s = FRESH_S
        (use,) = uses_of(in_host_memory(desk, "r"))
        answer(desk, [use.job_id], first, ranks=1)
        answer(desk, [use.job_id], second, ranks=1)
        assert desk.keys(desk.uploads()) == [use.key]


def test_an_answer_that_comes_late_does_not_overrule_what_is_known_since() -> None:
    desk = resident()
    desk.now_s = FRESH_S
    (slow,) = uses_of(in_host_memory(desk, "r"))
    desk.now_s += ASK_AGAIN_S
    (quick,) = uses_of(in_host_memory(desk, "again"))
    answer(desk, [quick.job_id], MISSING)
    answer(desk, [slow.job_id], EXISTS)
    assert desk.planner.ledger.index.verdict(slow.key, desk.now_s) is False
    (upload,) = desk.uploads()
    assert upload.key == slow.key


def test_a_fetch_that_ends_in_the_same_report_as_a_use_decides() -> None:
    """Several ranks' ends are in no order, and the use has asked before the fetch has ended."""
    desk = resident(slots=1, world_size=2)
    desk.now_s = FRESH_S
    (use,) = uses_of(in_host_memory(desk, "r"))
    desk.planner.finished("r")
    desk.make_resident("bbbb")  # takes the only slot
    (fetch,) = desk.fetches_for("again", "aaaa")
    report = StepReport()
    for rank in [(fetch, use), (use, fetch)]:
        for job in rank:
            outcome = Outcome.OK if job is fetch else MISSING
            report.add(JobEnd(job.job_id, job.kind, outcome, fresh_s=FRESH_S))
    desk.planner.on_report(report, desk.now_s)
    check(desk.planner)
    assert desk.planner.ledger.index.verdict(use.key, desk.now_s) is True
    assert desk.uploads() == (), "the bucket has it"


def test_a_reset_asks_for_nothing_of_before() -> None:
    desk = resident()
    desk.now_s = FRESH_S
    desk.planner.ledger.index.use(desk.key("aaaa"), desk.now_s)
    desk.planner.reset(b"salt")
    assert desk.uses() == ()


def test_books_balance_whatever_is_answered_and_when() -> None:
    """Evictions, uploads and answers in any order; `check` looks at the books each time."""
    for seed in range(30):
        draw = random.Random(seed)
        prompt = "aaaabbbbccccdddd"
        desk = resident(prompt, slots=5, blocks=64)
        asked: list[BucketJob] = []
        for number in range(40):
            desk.now_s += draw.choice([1.0, ASK_AGAIN_S, FRESH_S])
            plan = in_own_cache(desk, f"r{number}", prompt[: 4 * draw.randint(1, 4)])
            asked += uses_of(plan)
            for save in plan.saves:
                desk.copied(save)
                desk.uploaded(save, draw.choice([Outcome.OK, Outcome.FAILED]))
            outcome = draw.choice([Outcome.OK, Outcome.INVALID, Outcome.FAILED])
            desk.end(uploads_of(plan), outcome)
            draw.shuffle(asked)
            answer(desk, ids(asked[:2]), draw.choice([EXISTS, MISSING, Outcome.FAILED]))
            del asked[:2]
            desk.planner.finished(f"r{number}")
        assert desk.planner.ledger.uses_inflight == len(asked), f"seed {seed}"


def test_items_count_as_well_wherever_they_are() -> None:
    image = ec_desk.wanted("image")
    desk = ec_desk.Desk()
    desk.resident(image)
    ledger = desk.planner.ledger
    ledger.index.note_present(image.key, FRESH_S)
    desk.ensure("early", image)
    assert ledger.plan_due(desk.now_s) == []
    desk.now_s = FRESH_S
    desk.ensure("in host memory", image)
    (use,) = ledger.plan_due(desk.now_s)
    assert use.key == image.key
    desk.planner.on_end(JobEnd(use.job_id, JobKind.USE, EXISTS, fresh_s=FRESH_S), desk.now_s)
    desk.schedule("in host memory", image)
    desk.planner.finished("in host memory")
    desk.now_s += FRESH_S
    desk.ensure("in the engine's cache", image)
    (use,) = ledger.plan_due(desk.now_s)
    desk.planner.on_end(JobEnd(use.job_id, JobKind.USE, MISSING), desk.now_s)
    (upload,) = ledger.plan_due(desk.now_s)
    assert upload.key == image.key
    desk.ensure("waits beside the upload", ec_desk.wanted("other"))
    end = JobEnd(upload.job_id, JobKind.UPLOAD, Outcome.OK, fresh_s=FRESH_S)
    desk.planner.on_end(end, desk.now_s)
    check(desk.planner)
    assert ledger.index.verdict(image.key, desk.now_s) is True


def test_what_the_workers_have_uploaded_is_asked_for_when_it_is_due() -> None:
    image = ec_desk.wanted("image")
    desk = ec_desk.Desk()
    desk.planner.on_report(ItemReport(uploaded={image.key: FRESH_S}), 0.0)
    desk.planner._on_device.add(image.identifier)
    desk.now_s = FRESH_S
    desk.ensure("r", image)
    assert [use.key for use in desk.planner.ledger.plan_due(desk.now_s)] == [image.key]
