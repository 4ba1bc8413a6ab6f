"""The choice among budgets; `test_cost.py` has the sums behind it."""

from __future__ import annotations

import pytest

from s3kv.cli import budgets
from s3kv.cli.billing import GIB, Part
from s3kv.cli.budgets import BudgetMonth
from s3kv.errors import ConfigError
from s3kv.prices import Prices


def month(bucket_gib: float, tokens: int, net: float) -> BudgetMonth:
    return BudgetMonth(bucket_gib, 32.0, "lru", tokens, 10.0, 5.0, net + 15.0)


def test_the_largest_net_is_best_and_of_equals_the_smaller_budget() -> None:
    found = [month(100, 5, 1.0), month(200, 6, 7.0), month(400, 7, 7.0), month(0, 9, 7.0)]
    assert [one.net for one in found] == [1.0, 7.0, 7.0, 7.0]
    assert budgets.best(found).bucket_gib == 200
    assert budgets.most_hits(found).bucket_gib == 0


def test_what_is_left_after_the_requests_pays_for_storage() -> None:
    parts = [Part("PUT", 100, "", 0.5), Part("storage", 7, "", 2.0), Part("GET", 10, "", 1.0)]
    assert budgets.paid_bytes(parts, 100.0) == pytest.approx(20 * GIB)
    assert budgets.paid_bytes(parts, 59.0) == 0
    assert budgets.paid_bytes([Part("storage", 7, "", 0.0)], 59.0) is None


@pytest.mark.parametrize("result", [{}, {"runs": [], "seconds": 1.0}, {"runs": 3, "seconds": 1.0}])
def test_what_is_no_simulation(result: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="--simulation"):
        budgets.months(
            result, Prices(), keep_days=1.0, prefill_tokens_per_s=1.0, dollars_per_hour=1.0
        )
