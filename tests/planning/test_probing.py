"""How far the next prefix is asked for, after what came of the last."""

from __future__ import annotations

from itertools import count

import pytest

from s3kv.planning.probing import Probe
from s3kv.types import Outcome
from tests.planning.desk import CHUNK, FAILED, MISSING, OK, Desk

LETTERS = count(0x100)


def prompt(chunks: int) -> str:
    """Of a prefix nobody has seen."""
    return "".join(chr(next(LETTERS)) * CHUNK for _ in range(chunks))


def asked(desk: Desk, chunks: int, outcome: Outcome = OK, ends: int | None = None) -> int:
    """How much a new prompt asks for at first. All but the first `ends` are there, and those end
    so, too, if `outcome` says it."""
    text = prompt(chunks)
    desk.add(text, text)
    assert desk.lookup(text).wait
    fetches = desk.plan().fetches
    bad = len(fetches) if ends is None else ends
    desk.end(fetches[bad:])
    desk.end(fetches[:bad], outcome)
    desk.lookup(text)
    desk.end(desk.plan().fetches, MISSING)
    desk.planner.finished(text)
    return len(fetches)


@pytest.mark.parametrize(("most", "sizes"), [(32, [8, 16, 32, 32]), (12, [8, 12, 12]), (2, [2, 2])])
def test_twice_as_far_as_long_as_all_is_there(most: int, sizes: list[int]) -> None:
    desk = Desk(probe_chunks=most, slots=512)
    assert [asked(desk, 40) for _ in sizes] == sizes


@pytest.mark.parametrize(("most", "sizes"), [(32, [32, 16, 8, 8]), (12, [12, 8]), (2, [2, 2])])
def test_half_as_far_when_something_is_missing(most: int, sizes: list[int]) -> None:
    desk = Desk(probe_chunks=most, slots=512)
    desk.planner._prefix.probe.chunks = most
    assert [asked(desk, 40, MISSING, ends=1) for _ in sizes] == sizes


def test_a_prefix_that_is_missing_altogether_counts_once() -> None:
    desk = Desk(probe_chunks=32, slots=512)
    assert [asked(desk, 40) for _ in range(3)] == [8, 16, 32]
    assert [asked(desk, 40, MISSING) for _ in range(4)] == [32, 16, 8, 8]


def test_a_short_prompt_that_is_there_says_nothing_and_one_that_is_not_does() -> None:
    desk = Desk(probe_chunks=32, slots=512)
    assert asked(desk, 5) == 5
    assert asked(desk, 40) == 8
    assert asked(desk, 5, MISSING) == 5
    assert asked(desk, 40) == 8, "not 16"


@pytest.mark.parametrize("outcome", [FAILED, Outcome.CORRUPT, Outcome.CANCELLED])
def test_other_failures_say_nothing(outcome: Outcome) -> None:
    desk = Desk(probe_chunks=32, slots=512)
    for _ in range(2):
        assert asked(desk, 40, outcome, ends=1) == 8


def test_chunks_known_to_be_there_say_nothing() -> None:
    desk = Desk(probe_chunks=32, slots=512)
    text = prompt(8)
    for n in range(1, 8):
        desk.planner.ledger.index.note_present(desk.key(text[: n * CHUNK]))
    desk.add("r", text)
    assert desk.lookup("r").wait
    desk.end(desk.plan().fetches)
    assert desk.planner._prefix.probe.chunks == 8


def test_many_at_once_that_were_asked_equally_far_count_once() -> None:
    probe = Probe(64)
    for _ in range(5):
        probe.found(8)
    assert probe.chunks == 16
