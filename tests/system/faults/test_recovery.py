"""What a worker does about a store that ails, on real sockets: less, again, elsewhere, or later."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from lab import constants
from lab.faults import Fault, s3_error
from lab.proxy import Proxy, proxy
from lab.s3 import S3Server, moto_process
from s3kv.planning.breaker import BreakerState
from tests.servers import set_credentials
from tests.system.faults.life import CONSTANTS, SLOTS, Life
from tests.unit.io import rig

BUCKET = "faults"
PATIENT = {"request_timeout_ms": 120_000, "max_wait_ms": 60_000, "hedge_percent": 0.0}
"""With which no request is given up or sent twice because the machine stands still for a moment:
what is counted here is what the store was asked, and how it answered."""


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with moto_process() as found:
        found.client().create_bucket(Bucket=BUCKET)
        yield found


@pytest.fixture
def store(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    set_credentials(monkeypatch)
    with proxy(str(server.url)) as it:
        yield it
    server.empty(BUCKET)


class Place:
    """A server, the proxy before it, which ails, and the lives on them."""

    def __init__(self, server: S3Server, store: Proxy) -> None:
        self.server, self.store = server, store
        self._lives: list[Life] = []
        self._constants = contextlib.ExitStack()

    def begin(self, *more_urls: str, **settings: Any) -> Life:
        """Begin a life with these settings, and constants for all lives of the test."""
        settings, others = constants.split(PATIENT | settings)
        self._constants.enter_context(constants.changed(**(CONSTANTS | others)))
        self._lives.append(Life(self.store.url, BUCKET, "s3kv.io", *more_urls, **settings))
        assert self._lives[-1].start() is None
        return self._lives[-1]

    def fill(self, *numbers: int) -> None:
        client = self.server.client()
        for number in numbers:
            client.put_object(Bucket=BUCKET, Key=rig.object_key(number), Body=rig.sealed(number))

    def end(self) -> None:
        self._constants.close()
        for life in self._lives:
            if not life.is_over:
                life.stop()


@pytest.fixture
def place(server: S3Server, store: Proxy) -> Iterator[Place]:
    it = Place(server, store)
    yield it
    it.end()


def test_nothing_is_tried_again_when_nobody_waits_any_more(place: Place) -> None:
    # The first attempt is given up long after its request.
    life = place.begin(max_wait_ms=100, max_attempts=10, request_timeout_ms=3_000)
    place.fill(1)
    place.store.fault(Fault(kind="black_hole", verbs=("GET",)))
    assert life.serve(1) == 0
    life.settle()
    assert place.store.statistics().faults["black_hole"] == 1


def test_an_upload_is_tried_by_the_planner_alone(place: Place) -> None:
    life = place.begin(max_attempts=10)
    place.store.fault(s3_error(500, "InternalError", verbs=("PUT",)))
    life.compute(1)
    life.settle_jobs()
    assert place.store.statistics().requests["PUT"] == 1
    life.settle()
    assert place.store.statistics().requests["PUT"] == 5
    assert life.planner.counters["uploads_given_up"] == 1


def test_after_one_damaged_answer_the_next_upload_replaces_the_object(place: Place) -> None:
    life = place.begin()
    place.fill(1)
    place.store.fault(Fault(kind="flip_body", at=-5, verbs=("GET",), times=1))
    assert life.serve(1) == 0
    life.settle()
    assert life.counters()["upload_ok"] == 1, "whether the object or its reading was damaged"
    for number in range(SLOTS):
        life.compute(100 + number)
        life.settle()
    assert life.serve(1) == 1, "from the bucket"
    assert (life.counters()["fetch_corrupt"], life.counters()["fetch_ok"]) == (1, 1)


def test_the_breaker_opens_and_closes_for_all_ranks(place: Place) -> None:
    """One of two ranks cannot reach the store: a chunk is usable only when every rank has it."""
    with proxy(str(place.server.url)) as other:
        life = place.begin(other.url)
        breaker = life.planner.ledger.breaker
        breaker.first_pause_s = 25.0  # over when the test says so, and not before
        place.fill(*range(1, 40))
        assert life.serve(1) == 1
        other.fault(Fault(kind="refuse"))
        chunk = 2
        while breaker.state is BreakerState.CLOSED:
            assert life.serve(chunk) == 0
            chunk += 1
            assert chunk < 20, "it never opens"
        life.settle_jobs()
        asked = place.store.statistics().requests["GET"]
        assert life.serve(chunk) == 0
        assert place.store.statistics().requests["GET"] == asked, "nobody asks while it is open"
        life.later()
        assert life.serve(chunk + 1) == 0
        assert place.store.statistics().requests["GET"] == asked + 1, (
            "one finds out that it still fails"
        )
        other.lift()
        life.later()
        assert life.serve(chunk + 2) == 1
        assert breaker.state is BreakerState.CLOSED
        life.settle()


def test_who_may_not_write_may_still_read(place: Place) -> None:
    life = place.begin()
    place.store.fault(s3_error(403, "AccessDenied", verbs=("PUT",)))
    for number in range(10):
        life.compute(100 + number)
    life.settle()
    assert life.counters()["upload_denied"] == 50
    assert life.planner.ledger.breaker.state is BreakerState.CLOSED
    place.fill(1)
    assert life.serve(1) == 1


def test_a_denial_is_said_once_until_it_is_lifted(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    life = place.begin()
    place.fill(50)
    place.store.fault(s3_error(403, "AccessDenied", verbs=("GET",)))
    for number in range(1, 10):
        assert life.serve(number) == 0
        life.later()
    (error,) = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    assert "s3:GetObject on arn:aws:s3:::faults/" in error
    place.store.lift()
    life.later()
    assert life.serve(50) == 1
    assert "fetch is allowed again" in caplog.text


def test_of_ranks_that_hold_the_same_the_first_uploads_and_all_read(place: Place) -> None:
    life = place.begin(place.server.url, first_uploads=True)
    place.store.fault(s3_error(500, "InternalError", verbs=("PUT",)))
    life.compute(1, 2, 3)
    life.settle_jobs()
    assert life.planner.ledger.table.statistics().dirty == 3, "the other has nothing to upload"
    assert life.serve(1, 2, 3) == 3, "from host memory, meanwhile"
    place.store.lift()
    life.settle()
    assert [rank.counters["upload_ok"] for rank in life.ranks] == [3, 0]
    assert set(place.server.objects(BUCKET)) == {rig.object_key(number) for number in (1, 2, 3)}

    other = place.begin(place.server.url, first_uploads=True)
    assert other.serve(1, 2, 3) == 3
    assert [rank.counters["fetch_ok"] for rank in other.ranks] == [3, 3]


def test_saves_are_dropped_when_uploads_are_slower(place: Place) -> None:
    """No request and no step waits for an upload: all are served before the first has ended."""
    life = place.begin()
    place.store.fault(Fault(kind="black_hole", verbs=("PUT",)))
    for number in range(3 * SLOTS):
        life.compute(number)
    assert life.planner.counters["saves"] == SLOTS, "the newest are dropped, not the oldest"
    assert life.planner.counters["saves_dropped"] == 2 * SLOTS
    assert life.counters()["upload_ok"] + life.counters()["upload_failed"] == 0
    assert life.serve(0) == 1, "what was saved first is still there"
    assert life.serve(2 * SLOTS) == 0
    place.store.lift()
    place.store.cut()
    life.settle()
    assert {rig.object_key(number) for number in range(SLOTS)} <= set(place.server.objects(BUCKET))
