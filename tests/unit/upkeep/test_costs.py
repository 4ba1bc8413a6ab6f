"""A bucket that grows without a bound: when that is said, and what it would cost."""

from __future__ import annotations

from s3kv.upkeep.costs import GROWTH_KNOWN_S, growth_warning

PRICE = 0.023
MONTH_S = 365 / 12 * 86_400
GIB = 2**30


def test_the_rate_of_uploads_is_that_of_a_month() -> None:
    assert growth_warning(GROWTH_KNOWN_S - 1.0, 6 * GIB, PRICE) is None
    said = growth_warning(GROWTH_KNOWN_S, 6 * GIB, PRICE)
    gib = 6 * MONTH_S / GROWTH_KNOWN_S
    assert f"{gib:,.0f} GiB after a month" in said
    assert f"${gib * PRICE:,.2f} a month" in said
    assert "bucket_bytes" in said


def test_what_is_free_or_next_to_nothing() -> None:
    assert growth_warning(GROWTH_KNOWN_S, 1_000, PRICE) is None
    assert "$" not in growth_warning(GROWTH_KNOWN_S + 60.0, 6 * GIB, 0.0)
