"""Second requests: when, how many, which of the two may write."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from s3kv.errors import StoreUnavailable
from s3kv.io.sources.hedging import Arrival, Claim, Lateness, Unanswered, hedged
from s3kv.place import Place
from tests.waiting import until

Play = Callable[[Claim], Awaitable[int]]


def lateness(requests: int) -> Lateness:
    it = Lateness(3.0)
    for i in range(requests):
        it.sent()
        it.began(0.010 if i % 10 else 0.100)
    return it


MANY, LAST = 3, 2
"""Reads without a first byte: many, and the last ones."""


def test_before_there_is_a_measure_late_is_what_is_late_at_s3() -> None:
    it = lateness(requests=31)
    assert it.late_s(MANY) == pytest.approx(0.3)
    assert it.late_s(LAST) == pytest.approx(0.1)
    it.began(0.01)
    assert it.late_s(MANY) == pytest.approx(1.5 * 0.1)
    assert it.late_s(LAST) == it.late_s(1) == pytest.approx(3 * 0.01)


def test_late_is_what_few_others_are() -> None:
    it = Lateness(3.0)
    for i in range(320):
        it.sent()
        it.began(i % 100 / 1000)
    assert it.late_s(MANY) == pytest.approx(1.5 * 0.095, abs=0.01)
    assert it.late_s(LAST) == pytest.approx(1.5 * 0.095, abs=0.01)  # thrice the median is later


def test_late_follows_bursts_of_one_length() -> None:
    it = lateness(requests=1)
    for seconds in [0.02] * 320 + [0.5] * 320:
        it.began(seconds)
    assert it.late_s(MANY) == pytest.approx(1.5 * 0.5)


@pytest.mark.parametrize(("percent", "hedges"), [(3.0, 8 + 30), (0.0, 0)])
def test_only_a_few_percent_are_sent_again(percent: float, hedges: int) -> None:
    it = Lateness(percent)
    taken = 0
    for _ in range(1000):
        it.sent()
        taken += it.take()
    assert taken == pytest.approx(hedges, abs=1)


@pytest.mark.parametrize("reads", [0, 100_000])
def test_a_budget_that_was_not_needed_is_not_saved_up(reads: int) -> None:
    it = lateness(requests=reads)
    assert sum(it.take() for _ in range(1000)) == 8


class Reads:
    """Reads without a first byte, at a store where the last ones are late after 60 ms, and the
    others after five minutes."""

    def __init__(self) -> None:
        lateness = Lateness(100.0)
        for number in range(32):
            lateness.began(0.02 if number < 20 else 200.0)
        self.them = Unanswered(lateness)

    def send(self, count: int) -> list[asyncio.Future[None]]:
        return [self.them.sent() for _ in range(count)]


async def test_the_last_reads_are_late_earlier() -> None:
    reads = Reads()
    first, second, third = reads.send(3)
    await asyncio.sleep(0.1)
    assert not any(read.done() for read in (first, second, third))
    reads.them.answered(second)
    assert first.done()
    assert third.done()
    assert not second.done()


async def test_a_read_is_not_late_because_others_were_the_last_before() -> None:
    reads = Reads()
    (first,) = reads.send(1)
    rest = reads.send(3)
    await asyncio.sleep(0.1)
    assert not any(read.done() for read in (first, *rest))


async def test_all_reads_are_late_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lateness, "late_s", lambda self, unanswered: 0.02)
    reads = Reads()
    early = reads.send(5)
    await asyncio.sleep(0.01)
    late = reads.send(5)
    await asyncio.wait_for(asyncio.gather(*early, *late), 30)


async def test_reads_are_counted_until_their_first_byte_and_late_by_the_clock() -> None:
    reads = Reads()
    first, second = reads.send(2)
    assert len(reads.them._sent_s) == 2
    reads.them.answered(first)
    reads.them.answered(first)
    assert len(reads.them._sent_s) == 1
    await asyncio.wait_for(second, 30)
    assert len(reads.them._sent_s) == 1
    reads.them.answered(second)
    assert len(reads.them._sent_s) == 0


class Requests:
    """Each request does what it was told to, in the order in which they are sent."""

    def __init__(self, *plays: Play) -> None:
        self._plays = list(plays)
        self.running = 0
        self.sent = 0

    async def __call__(self, claim: Claim) -> int:
        self.sent += 1
        self.running += 1
        try:
            return await self._plays.pop(0)(claim)
        finally:
            try:
                await asyncio.sleep(0)  # a cancellation may come while it cleans up
            finally:
                self.running -= 1


async def silent(claim: Claim) -> int:
    await asyncio.Event().wait()
    raise AssertionError


async def quick(claim: Claim) -> int:
    return 1 if claim() else -1


async def absent(claim: Claim) -> int:
    return 404


def failing(after_s: float) -> Play:
    async def play(claim: Claim) -> int:
        await asyncio.sleep(after_s)
        raise StoreUnavailable("reset")

    return play


def body(
    claimed_after_s: float, seconds: float, value: int, buffer: list[int] | None = None
) -> Play:
    async def play(claim: Claim) -> int:
        await asyncio.sleep(claimed_after_s)
        for _ in range(10):  # as bytes come, whose head was allowed
            if not claim():
                return -1
            if buffer is not None:
                buffer.append(value)
            await asyncio.sleep(seconds / 10)
        return value

    return play


async def run(requests: Requests, late_s: float = 0.01, may: bool = True) -> tuple[int, bool]:
    try:
        late = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(late_s, late.set_result, None)
        return await hedged(requests, late, lambda: may)
    finally:
        assert requests.running == 0, "something may still write"


async def test_the_second_wins_over_one_that_is_silent() -> None:
    assert await run(Requests(silent, quick)) == (1, True)


async def test_nothing_is_sent_twice_without_need_or_leave() -> None:
    requests = Requests(quick, quick)
    assert await run(requests, late_s=10.0) == (1, False)
    assert requests.sent == 1
    requests = Requests(body(0.03, 0.0, 7), quick)
    assert await run(requests, may=False) == (7, False)
    assert requests.sent == 1
    requests = Requests(body(0.0, 0.05, 7), quick)
    assert await run(requests) == (7, False)
    assert requests.sent == 1, "a body on its way is not late"


async def test_the_first_may_still_win_and_ends_the_second() -> None:
    second = asyncio.Event()

    async def first(claim: Claim) -> int:
        await second.wait()
        return await body(0.0, 0.0, 7)(claim)

    async def silent_second(claim: Claim) -> int:
        second.set()
        return await silent(claim)

    requests = Requests(first, silent_second)
    assert await run(requests) == (7, False)
    assert requests.sent == 2


async def test_the_loser_ends_before_the_body_of_the_winner() -> None:
    may_end = asyncio.Event()

    async def winner(claim: Claim) -> int:
        assert claim()
        await may_end.wait()
        return 8

    requests = Requests(silent, winner)
    task = asyncio.create_task(run(requests))
    async with asyncio.timeout(30):
        await until(lambda: requests.sent >= 2 and requests.running != 2)
    may_end.set()
    assert await task == (8, True)


async def test_only_one_may_write() -> None:
    for head_s in (0.0, 0.005, 0.01, 0.015, 0.02):
        written: list[int] = []
        first, second = body(0.02, 0.02, 7, written), body(head_s, 0.02, 8, written)
        value, _ = await run(Requests(first, second))
        assert written == [value] * 10


async def test_heads_that_arrive_in_the_same_breath() -> None:
    """Sockets are read by callbacks: a cancelled task may not have been told yet."""
    claims: list[Claim] = []

    async def wait(claim: Claim) -> int:
        claims.append(claim)
        return await silent(claim)

    task = asyncio.create_task(run(Requests(wait, wait)))
    await until(lambda: len(claims) == 2)
    assert [claims[1](), claims[0](), claims[1]()] == [True, False, True]
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_the_loser_of_a_claim_may_end_before_the_loop_knows_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Claims are made in the threads that serve the connections."""
    loop = asyncio.get_running_loop()
    late: asyncio.Future[None] = loop.create_future()
    late.set_result(None)
    settled: list[Callable[[], object]] = []
    monkeypatch.setattr(loop, "call_soon_threadsafe", settled.append)
    claims: list[Claim] = []
    lost = asyncio.Event()

    async def request(claim: Claim) -> int:
        claims.append(claim)
        if len(claims) == 1:
            await lost.wait()
            await asyncio.sleep(0.01)
            return 1
        assert claims[0]()
        assert not claim()
        lost.set()
        return 2

    assert await hedged(request, late, lambda: True) == (1, False)
    settled.pop()()


async def test_an_object_that_is_absent_needs_no_buffer() -> None:
    assert await run(Requests(silent, absent)) == (404, False)


async def test_an_error_waits_for_the_other() -> None:
    assert await run(Requests(body(0.05, 0.0, 7), failing(0.0))) == (7, False)
    assert await run(Requests(failing(0.02), body(0.05, 0.0, 7))) == (7, True)


async def test_two_errors_are_an_error() -> None:
    with pytest.raises(StoreUnavailable):
        await run(Requests(failing(0.03), failing(0.0)))


async def test_the_winner_failing_is_not_rescued_by_who_was_sent_away() -> None:
    async def claim_and_fail(claim: Claim) -> int:
        assert claim()
        raise StoreUnavailable("reset in the middle of the body")

    with pytest.raises(StoreUnavailable):
        await run(Requests(silent, claim_and_fail))


async def test_cancelling_ends_both() -> None:
    requests = Requests(silent, silent)
    task = asyncio.create_task(run(requests))
    await until(lambda: requests.sent == 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert requests.running == 0


def test_a_read_lands_where_the_length_says_if_its_claim_is_granted() -> None:
    place, landed = Place.of(bytearray(10)), list[int]()

    def land(nbytes: int) -> Place:
        landed.append(nbytes)
        return place.cut(10 - nbytes, 10)

    assert Arrival(lambda: False, land).begin(3) is None
    assert landed == []
    memory = Arrival(lambda: True, land).begin(3)
    memory.write(b"end")
    assert bytes(place) == bytes(7) + b"end"
