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


def test_the_budgets_are_what_the_file_says() -> None:
    result = json.loads((ROOT / "benchmarks/results/bucket-kept.json").read_text())
    hours = 730 * 3600 / 3537
    for budget, line in zip(result["budgets"], costs.budgets(result).splitlines()[2:], strict=True):
        ours = budget["runs"]["s3kv"]
        puts = ours["puts"] + ours["copies"] + ours["lists"] + ours["lease_puts"]
        requests = (puts * 0.005 + (ours["gets"] + ours["heads"]) * 0.0004) / 1000 * hours
        spared = ours["bucket_hits"] * 512 / 8_000 / 3600 * 3 * hours
        storage = ours["peak_objects"] / 16 * 0.023
        cells = [cell.strip(" *").replace(",", "") for cell in line.split("|")[1:-1]]
        told = [float(cell) for cell in cells[2:]]
        assert told == pytest.approx(
            [requests, storage, spared, spared - requests - storage], abs=2
        )
