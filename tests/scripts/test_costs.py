"""The worked numbers of the cost guide, worked out once more by hand."""

from __future__ import annotations

import json

import pytest

from scripts import costs
from tests.project import ROOT

SMALL, LARGE, FP8 = costs.ENGINES


def test_a_chunk_of_the_small_model() -> None:
    # 32 layers × 8 heads × (128 + 128) numbers × 2 bytes × 256 tokens
    assert SMALL.chunk_bytes == 32 * 8 * 256 * 2 * 256 == 32 * 2**20
    # 32 ms at $3 an hour
    assert SMALL.compute_dollars == pytest.approx(0.032 * 3 / 3600)
    # A 32nd of a GiB at $0.023 a month, seven days of 365/12
    assert SMALL.storage_dollars(7) == pytest.approx(0.023 / 32 * 7 * 12 / 365)
    assert SMALL.put_dollars == pytest.approx(0.005 / 1000)
    assert SMALL.break_even(7) == pytest.approx(
        (5e-6 + 0.023 / 32 * 7 * 12 / 365) / (0.032 * 3 / 3600 - 4e-7)
    )


def test_the_large_model_has_an_object_per_rank() -> None:
    assert LARGE.chunk_bytes == 80 * 8 * 256 * 2 * 256 == 80 * 2**20
    assert LARGE.put_dollars == pytest.approx(4 * 0.005 / 1000)
    assert LARGE.break_even(1) < SMALL.break_even(1)


def test_fp8_halves_what_is_kept_and_not_what_is_asked() -> None:
    assert FP8.chunk_bytes * 2 == LARGE.chunk_bytes
    assert FP8.put_dollars == LARGE.put_dollars


def test_the_bill_is_of_what_the_file_says() -> None:
    """Storage, the largest part: what an hour stores, for the 24 hours it is kept."""
    runs = json.loads((ROOT / "benchmarks/results/trace-session.json").read_text())["runs"]
    (run,) = (r for r in runs if (r["policy"], r["host_gib"]) == ("lru", 32.0))
    (line,) = (x for x in costs.bill().splitlines() if x.startswith(" storage"))
    dollars = float(line.split()[-1].replace(",", ""))
    # The file has GiB to one digit.
    assert dollars == pytest.approx(run["gib_stored"] * 24 * 0.023, abs=0.1 * 24 * 0.023)
