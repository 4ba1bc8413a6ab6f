"""The speeds that decide whether compressing pays."""

from __future__ import annotations

import random

import pytest

from s3kv.io.sources.speeds import OFF_ABOVE, ON_BELOW, Speeds, pays

MIB = 2**20


def received(*spans: tuple[float, float], nbytes: int = 64 * MIB) -> float | None:
    """Speed in MiB/s after receptions of so many bytes each, in the order of their ends."""
    speeds = Speeds()
    for begin_s, end_s in spans:
        speeds.received(nbytes, begin_s, end_s)
    return speeds.wire_bytes_per_s and speeds.wire_bytes_per_s / MIB


def test_objects_that_arrive_at_once_share_their_time() -> None:
    assert received((5.0, 6.0)) == 64
    assert received((5.0, 6.0), (6.0, 7.0)) == 64
    assert received((5.0, 6.0), (5.0, 6.0)) == 128
    assert received((5.0, 6.0), (5.5, 7.0)) == 64
    assert received((5.0, 6.0), (5.9, 6.0), (5.0, 7.0)) == 96


def test_a_long_reception_around_short_ones_counts_whole() -> None:
    assert received((6.0, 7.0), (8.0, 8.5), (5.0, 9.0)) == 48


def test_the_time_between_two_objects_does_not_count() -> None:
    assert received((5.0, 6.0), (1000.0, 1001.0)) == 64


def test_the_order_in_which_two_ends_are_noted_does_not_matter() -> None:
    assert received((5.0, 7.0), (5.0, 6.0)) == received((5.0, 6.0), (5.0, 7.0)) == 64


def test_objects_of_one_size_that_arrive_without_a_pause() -> None:
    """However many of them at once, and whenever each of them begins."""
    for seed in range(20):
        print(f"seed {seed}")
        rng = random.Random(seed)
        ends_s = sorted(rng.uniform(1.0, 100.0) for _ in range(500))
        spans = [(end_s - rng.uniform(2.0, 4.0), end_s) for end_s in ends_s]
        begin_s = min(begin_s for begin_s, _ in spans)
        expected = len(spans) / (ends_s[-1] - begin_s)
        assert received(*spans, nbytes=MIB) == pytest.approx(expected, rel=0.05)


def test_a_speed_is_not_known_from_a_few_bytes_or_without_time() -> None:
    assert Speeds().wire_bytes_per_s is None
    assert Speeds().decoding_bytes_per_s is None
    assert received((5.0, 6.0), nbytes=31 * MIB) is None
    assert received((5.0, 6.0), nbytes=32 * MIB) == 32
    assert received((5.0, 5.0)) is None
    assert received((5.0, 4.0), (5.0, 6.0)) == 128  # a clock that two threads read


def test_older_bytes_count_less() -> None:
    speeds = Speeds()
    for _ in range(1000):
        speeds.decoded(MIB, 1.0)
    assert speeds.decoding_bytes_per_s == MIB
    for _ in range(3000):
        speeds.decoded(MIB, 0.1)
    assert 5 * MIB < speeds.decoding_bytes_per_s < 10 * MIB
    for _ in range(10_000):
        speeds.decoded(MIB, 0.1)
    assert speeds.decoding_bytes_per_s == pytest.approx(10 * MIB, rel=0.01)
    assert speeds.wire_bytes_per_s is None


def test_compressing_pays_unless_the_wire_is_nearly_as_fast_as_decoding() -> None:
    """Between the limits it stays as it is, so that a measurement does not change it each time."""
    assert pays(None, 1.0, before=True)
    assert pays(None, 1.0, before=False)
    between = (ON_BELOW + OFF_ABOVE) / 2
    for share, if_before, if_not in (
        (0.0, True, True),
        (ON_BELOW - 0.01, True, True),
        (between, True, False),
        (OFF_ABOVE + 0.01, False, False),
        (9.0, False, False),
    ):
        assert pays(share * 4e9, 4e9, before=True) is if_before
        assert pays(share * 4e9, 4e9, before=False) is if_not
