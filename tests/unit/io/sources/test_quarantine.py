"""The quarantine: which keys may be read, by what has happened to them."""

from __future__ import annotations

import pytest

from s3kv.io.sources.quarantine import BARRED_S, Quarantine


def test_the_quarantine_is_bounded_and_forgets_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("s3kv.io.sources.quarantine.CAPACITY_KEYS", 3)
    quarantine = Quarantine()
    for key in ("a", "b", "c", "a", "d"):
        quarantine.bad(key, 0.0)
    assert [quarantine.holds(key) for key in "abcd"] == [True, False, True, True]


def test_a_key_is_barred_for_a_while_after_each_bad_reading() -> None:
    quarantine = Quarantine()
    for now_s in (0.0, BARRED_S):
        assert not quarantine.bars("key", now_s)
        quarantine.bad("key", now_s)
        assert quarantine.bars("key", now_s + BARRED_S - 1)
    quarantine.lift("key")
    assert not quarantine.bars("key", BARRED_S)
    assert not quarantine.holds("key")
