"""A bucket that grows without a bound: when that is said, and what it would cost."""

from __future__ import annotations

from s3kv.upkeep.costs import GROWTH_KNOWN_S, Growth

PRICE = 0.023
MONTH_S = 365 / 12 * 86_400
GIB = 2**30


def test_the_rate_of_uploads_is_that_of_a_month() -> None:
    growth = Growth()
    assert growth.warning(1_000.0, GIB, PRICE) is None
    assert growth.warning(999.0 + GROWTH_KNOWN_S, 6 * GIB, PRICE) is None
    said = growth.warning(1_000.0 + GROWTH_KNOWN_S, 6 * GIB, PRICE)
    gib = 6 * MONTH_S / GROWTH_KNOWN_S
    assert said is not None
    assert f"{gib:,.0f} GiB after a month" in said
    assert f"${gib * PRICE:,.2f} a month" in said
    assert "bucket_bytes" in said


def test_time_without_uploads_does_not_count() -> None:
    growth = Growth()
    for second in range(0, 10_000, 60):
        assert growth.warning(float(second), 0, PRICE) is None
    assert growth.warning(10_000.0, GIB, PRICE) is None


def test_what_is_free_or_next_to_nothing() -> None:
    growth = Growth()
    growth.warning(0.0, 1, PRICE)
    assert growth.warning(GROWTH_KNOWN_S, 1_000, PRICE) is None
    said = growth.warning(GROWTH_KNOWN_S + 60.0, 6 * GIB, 0.0)
    assert said is not None
    assert "$" not in said
