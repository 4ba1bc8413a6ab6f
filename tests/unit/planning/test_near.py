"""Near fetches: while the bucket is away, this host's disk is asked, which tells nothing of it."""

from __future__ import annotations

from typing import Any

import pytest

from s3kv.messages import BucketJob, JobEnd, JobKind, StepReport
from s3kv.planning.breaker import Breaker, BreakerState
from s3kv.planning.requests import NOTHING, WAIT
from s3kv.planning.residency import Change, Residency
from s3kv.types import Outcome
from tests.plans import uses_of
from tests.unit.planning import ec_desk, test_offload
from tests.unit.planning.desk import FAILED, MISSING, OK, Desk
from tests.unit.planning.test_offload import HIT, MISS

CLOSED, OPEN, HALF_OPEN = BreakerState


def away(**setup: Any) -> Desk:
    """Three fetches have failed in a row."""
    desk = Desk(has_disk=True, **{"probe_chunks": 3, **setup})
    desk.end(desk.fetches_for("unlucky", "aaaabbbbcccc"), FAILED)
    assert desk.planner.ledger.breaker.state is OPEN
    desk.planner.ledger.residency.take()
    return desk


def nearness(fetches: tuple[BucketJob, ...]) -> list[bool]:
    return [fetch.near for fetch in fetches]


def test_a_miss_on_the_disk_is_no_verdict() -> None:
    desk = away()
    ledger, key = desk.planner.ledger, desk.key("xxxx")
    ledger.index.note_present(key)
    fetches = desk.fetches_for("r", "xxxxyyyy")
    assert nearness(fetches) == [True, True]
    desk.end(fetches, MISSING, near=True, seconds=0.1)
    assert desk.lookup("r") == NOTHING
    assert ledger.index.is_present(key), "as before"
    assert ledger.index.verdict(desk.key("xxxxyyyy"), desk.now_s) is None
    assert {entry.residency for entry in ledger.residency.take() if isinstance(entry, Change)} == {
        Residency.NOTHING
    }
    assert ledger.breaker.is_open(desk.now_s)
    assert desk.planner.pace.fetch.absence_s is None
    assert desk.planner.pace.fetch.absent_share == 0.0
    assert desk.planner.counters["fetches_refused_by_breaker"] == 0


def test_the_disk_serves_while_the_bucket_is_away() -> None:
    desk = away()
    desk.end(desk.fetches_for("r", "xxxxyyyy"), near=True)
    assert desk.lookup("r").tokens == 8
    assert desk.planner.ledger.breaker.state is OPEN
    desk.end(desk.fetches_for("s", "zzzz"), FAILED)
    assert desk.planner.ledger.breaker.state is OPEN, "a near fetch fails by itself"


def test_the_disk_does_not_answer_for_the_bucket() -> None:
    desk = away()
    breaker = desk.planner.ledger.breaker
    desk.now_s = 0.5
    for name in ("aaaazzzz", "bbbbzzzz"):
        fetches = desk.fetches_for(name, name)
        assert nearness(fetches) == [False, True], "one of them finds out"
        desk.end(fetches[1], near=True)
        assert nearness(desk.fetches_for(f"beside {name}", f"c{name}")) == [True, True, True][:2]
        desk.end(fetches[0], near=True)
        assert breaker.state is HALF_OPEN
    (fetch, *_) = desk.fetches_for("r", "xxxx")
    assert not fetch.near
    desk.end(fetch, MISSING)
    assert breaker.state is CLOSED


def test_hits_on_the_disk_between_failures_do_not_hide_them() -> None:
    desk = Desk(has_disk=True)
    for prompt in ("aaaa", "bbbb", "cccc"):
        desk.end(desk.fetches_for(prompt, prompt), FAILED)
        desk.end(desk.fetches_for(f"{prompt} again", prompt.upper()), near=True)
    assert desk.planner.ledger.breaker.state is OPEN


@pytest.mark.parametrize("near_first", [True, False])
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize(
    ("other", "state"), [(FAILED, OPEN), (OK, CLOSED), (MISSING, CLOSED)], ids=str
)
def test_an_end_is_near_if_it_is_on_every_rank(
    other: Outcome, state: BreakerState, *, together: bool, near_first: bool
) -> None:
    desk = Desk(has_disk=True, world_size=2, probe_chunks=1)
    ledger = desk.planner.ledger
    for _ in range(2):
        ledger.breaker.failed(desk.now_s)
    (fetch,) = desk.fetches_for("r", "aaaa")
    report = StepReport()
    near = JobEnd(fetch.job_id, JobKind.FETCH, OK, 0, 9.0, fresh_s=0.0, near=True)
    far = JobEnd(fetch.job_id, JobKind.FETCH, other)
    for end in (near, far) if near_first else (far, near):
        report.add(end)
        if not together:
            desk.planner.on_report(report, desk.now_s)
            report = StepReport()
    desk.planner.on_report(report, desk.now_s)
    assert ledger.breaker.state is state
    assert (ledger.breaker._failures == 0) is (state is CLOSED)
    assert ledger.index.is_present(fetch.key) is (other is OK)
    assert ledger.index.verdict(fetch.key, desk.now_s) is (False if other is MISSING else None)


def test_what_the_disk_has_and_the_bucket_lacks_is_uploaded_when_it_is_used() -> None:
    desk = Desk(has_disk=True)
    (fetch,) = desk.fetches_for("r", "aaaaz")
    desk.end(fetch, near=True)
    assert desk.planner.ledger.index.verdict(fetch.key, desk.now_s) is None
    assert desk.lookup("r").tokens == 4
    desk.admit("r", [0, 1, 2], 4)
    desk.plan()
    desk.planner.loaded(["r"])
    (use,) = uses_of(desk.run("r", [0, 1, 2], 4, 1, new=True))
    desk.end(use, MISSING)
    (upload,) = desk.uploads()
    assert upload.key == fetch.key


def test_what_is_known_of_the_bucket_outlives_a_hit_on_the_disk() -> None:
    desk = Desk(has_disk=True, slots=1)
    desk.make_resident("aaaa", "bbbb")
    desk.planner.ledger.residency.take()
    (fetch,) = desk.fetches_for("r", "aaaa")
    desk.end(fetch, near=True)
    assert desk.planner.ledger.index.verdict(fetch.key, desk.now_s) is True
    changes = [e.residency for e in desk.planner.ledger.residency.take() if isinstance(e, Change)]
    assert Residency.BUCKET_STORED not in changes, "once is enough"


def test_who_waits_for_the_disk_goes_by_its_own_time() -> None:
    """Computing a chunk takes 0.5 s, the bucket 0.6 s, and the disk 0.1 s."""
    desk = Desk(has_disk=True, gate=True, max_wait_s=50.0, probe_chunks=1)
    pace = desk.planner.pace
    desk.end(desk.fetches_for("first", "zzzz"), seconds=0.6)
    desk.ask("second", "yyyy")
    desk.end(desk.fetches(), near=True, seconds=0.1)
    assert desk.ask("r", "aaaa") == NOTHING
    desk.end(desk.fetches(), FAILED)
    for _ in range(2):
        desk.planner.ledger.breaker.failed(desk.now_s)
    assert desk.ask("s", "bbbb") == WAIT
    desk.now_s += 0.4
    assert desk.lookup("s") == NOTHING, "it is late"
    assert pace.forecast(1, 0).all_s == pytest.approx(0.6)
    assert pace.forecast(1, 0, near=True).all_s == pytest.approx(0.8)
    desk.end(desk.fetches(), near=True, seconds=0.2)
    assert pace.near_share == pytest.approx(0.36)
    assert pace.forecast(1, 0).all_s == pytest.approx(0.64 * 0.6 + 0.36 * 0.15)
    assert pace.forecast(1, 0, near=True).all_s == pytest.approx(0.15)


def test_items_are_fetched_from_the_disk_as_well() -> None:
    desk = ec_desk.Desk(has_disk=True)
    ledger, image = desk.planner.ledger, ec_desk.wanted("image")
    for _ in range(3):
        ledger.breaker.failed(desk.now_s)
    desk.bucket.add(image.key)
    for item in (image, ec_desk.wanted("other")):
        assert not desk.ensure(item.identifier, item)
        assert desk.orders[0][0].near
        desk.answer(near=True)
        assert desk.ensure(item.identifier, item)
        assert desk.holds(item) is (item is image)
    assert ledger.breaker.state is OPEN
    assert desk.planner.pace.fetch.absence_s is None
    assert desk.planner.pace.near.absence_s == pytest.approx(0.1)
    assert not desk.ensure("slow", ec_desk.wanted("slow"))
    desk.now_s += 0.6
    assert desk.ensure("slow", ec_desk.wanted("slow")), "it would be patient with a new bucket"
    assert desk.planner.pace.fetch.at(0) is None


def test_the_tier_fetches_from_the_disk_as_well() -> None:
    desk = test_offload.Desk("a", is_observed=True)
    planner = desk.planner
    planner.breaker = breaker = Breaker(threshold=1, has_disk=True)
    breaker.failed(desk.now_s)
    assert desk.look_up("a", 1, 2) == [HIT, HIT]
    jobs = desk.load("a", 1, 2)
    assert [job.near for job in jobs] == [True, True]
    desk.end_pass()
    desk.end(jobs[:1], near=True, fresh_s=0.0)
    desk.end(jobs[1:], MISSING, near=True)
    assert desk.look_up("a", 2) == [MISS]
    assert planner.index.verdict(jobs[1].key, desk.now_s) is None, "no verdict"
    assert planner.changes == [(test_offload.name_of(0, 1), True)]
    assert breaker.is_open(desk.now_s)
    assert (planner.pace.fetch.absence_s, planner.pace.near.absence_s) == (None, 0.01)
    planner.use(test_offload.row_key(test_offload.name_of(0, 1)), desk.now_s)
    desk.end(planner.uses(), Outcome.EXISTS)
    desk.end(desk.load("a", 1), near=True, fresh_s=0.0)
    assert planner.index.verdict(jobs[0].key, desk.now_s) is True, "it is known"
    desk.now_s += 0.5
    planner.begin("b")
    desk.look_up("b", 3, 4)
    jobs = desk.load("b", 3, 4)
    assert [job.near for job in jobs] == [False, True]
    desk.end(jobs, near=True)
    assert breaker.state is HALF_OPEN
    assert breaker.allows(desk.now_s), "the next one finds out"
    desk.end(desk.load("b", 5), FAILED)
    assert breaker.state is HALF_OPEN, "a near fetch fails by itself"
    assert planner.counters["fetches_refused_by_breaker"] == 0


def test_a_wait_of_the_tier_for_the_disk_goes_by_its_own_time() -> None:
    desk = test_offload.Desk("a")
    pace = desk.planner.pace
    desk.look_up("a", 100)
    desk.end_pass("a")
    desk.now_s += 0.1
    desk.store("a", *range(100, 108))
    desk.planner.breaker = breaker = Breaker(threshold=1, has_disk=True)
    for near, seconds in ((True, 0.01), (False, 0.9)):
        pace.fetched(OK, seconds, 1, 1, near=near)
    breaker.failed(desk.now_s)
    desk.look_up("a", 1)
    desk.load("a", 1)
    desk.end_pass()
    assert not desk.planner.transfers.take_cancels(), "the bucket alone is too slow"
    desk.now_s += 0.4
    desk.end_pass()
    assert desk.planner.transfers.take_cancels()
    assert pace.forecast(1, 0).all_s == pytest.approx(0.9 - 0.16 * 0.1)
    assert pace.forecast(1, 0, near=True).all_s == pytest.approx(0.8)
