"""The life of I/O processes, event by event, on a clock of the test's."""

from __future__ import annotations

import pytest

from s3kv.io.process_life import LIFE_TRANSITIONS, Heartbeat, LifeEvent, ProcessLife, State


def test_a_job_is_never_ended_before_the_death_of_its_process() -> None:
    """Jobs end at DOWN: only a confirmed death leads there from a process that ran."""
    to_down = {(s, e) for (s, e), after in LIFE_TRANSITIONS.items() if after is State.DOWN}
    assert to_down == {(State.DYING, LifeEvent.DIE), (State.DOWN, LifeEvent.REFUSE)}
    with pytest.raises(AssertionError, match="not possible"):
        ProcessLife().died("of nothing", 0.0)


def test_the_first_failure_is_the_reason_and_sets_the_time_of_the_kill() -> None:
    life = ProcessLife()
    life.started(10.0)
    life.failed("a bad message", 10.0, broke_protocol=True)
    life.failed("", 12.0)
    assert life.is_due(State.DYING, 10.0)
    life.died("signal 9", 10.1)
    assert (life.reason, life.broke_protocol, life.deaths) == ("a bad message", True, 1)
    life.started(11.0)
    life.failed("", 13.0)
    assert not life.is_due(State.DYING, 12.9)
    life.died("exit status 1", 12.9)
    assert (life.reason, life.broke_protocol) == ("exit status 1", False)


@pytest.mark.parametrize("starts", [True, False])
def test_pauses_between_starts_double_up_to_a_maximum(starts: bool) -> None:
    life, now_s, pauses = ProcessLife(), 0.0, []
    life.started(now_s)
    for _ in range(2000):  # more than a float has powers of two
        if life.state is State.UP:
            life.failed("", now_s)
            life.died("", now_s)
        else:
            life.refused(now_s)
        before_s = now_s
        while not life.is_due(State.DOWN, now_s):
            now_s += 0.1
        pauses.append(round(now_s - before_s, 1))
        if starts:
            life.started(now_s)
    expected = [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6] + 1991 * [30.0]
    assert pauses == pytest.approx(expected, abs=0.2)


def test_a_process_that_has_lived_long_is_replaced_at_once() -> None:
    life, now_s = ProcessLife(), 0.0
    for lived_s in (1.0, 1.0, 1.0, 31.0):
        life.started(now_s)
        now_s += lived_s
        life.failed("", now_s)
        life.died("", now_s)
    assert life.is_due(State.DOWN, now_s + 0.11)


def test_a_ping_a_second_and_silence_after_thirty() -> None:
    heart = Heartbeat(0.0)
    assert heart.check(90.0) == "waits", "a busy machine takes long to start it"
    assert heart.check(91.1) == "hangs"
    heart = Heartbeat(0.0)
    heart.answered()
    assert heart.is_idle(0.9)
    assert heart.check(0.9) is None
    assert heart.check(1.0) == "ping"
    assert not heart.is_idle(1.1)
    assert heart.check(31.0) == "waits"
    assert heart.check(32.0) == "hangs"
    heart.answered()
    assert heart.check(3600.0) == "ping", "an engine that pauses does not make a process hang"
