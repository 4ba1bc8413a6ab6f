"""The quarantine: which keys may be read, by what has happened to them."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from s3kv.io.sources.quarantine import SUSPECT_S, Quarantine


def test_the_quarantine_is_bounded_and_forgets_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("s3kv.io.sources.quarantine.CAPACITY_KEYS", 3)
    quarantine = Quarantine()
    for key in ("a", "b", "c", "a", "d"):
        quarantine.bad(key, 0.0)
    assert [quarantine.suspects(key) for key in "abcd"] == [True, False, True, True]


NONE, SUSPECT, TWICE = "none", "suspect", "bad twice"
TABLE = {
    NONE: {"bad": SUSPECT, "lift": NONE, "exists": NONE, "certain": TWICE},
    SUSPECT: {"bad": TWICE, "lift": NONE, "exists": NONE, "certain": TWICE},
    TWICE: {"bad": TWICE, "lift": NONE, "exists": TWICE, "certain": TWICE},
}
"""What may be read after an event; a suspect that exists may, and is bad the next time."""
SAYS: dict[str, Callable[[Quarantine], None]] = {
    "bad": lambda quarantine: quarantine.bad("key", 0.0),
    "lift": lambda quarantine: quarantine.lift("key"),
    "exists": lambda quarantine: quarantine.exists("key"),
    "certain": lambda quarantine: quarantine.bad("key", 0.0, certain=True),
}


@pytest.mark.parametrize(("state", "event"), list(itertools.product(TABLE, SAYS)))
def test_a_key_goes_where_the_table_says(state: str, event: str) -> None:
    quarantine = Quarantine()
    for _ in range([NONE, SUSPECT, TWICE].index(state)):
        quarantine.bad("key", 0.0)
    SAYS[event](quarantine)
    barred = quarantine.bars("key", 0.0), quarantine.bars("key", SUSPECT_S)
    expected = {NONE: (False, False), SUSPECT: (True, False), TWICE: (True, True)}
    assert barred == expected[TABLE[state][event]]
    quarantine.bad("key", 0.0)
    again = state == SUSPECT and event == "exists"
    assert quarantine.bars("key", 1e9) == (again or TABLE[state][event] != NONE)
