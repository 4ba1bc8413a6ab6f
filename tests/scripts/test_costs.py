"""The worked numbers of the cost guide, worked out once more by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks import trace
from benchmarks.simulation.fleet import Setup
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


def recorded(name: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((ROOT / "benchmarks/results" / name).read_text())
    return result


GRIDS = [pytest.param(name, recorded(file), id=name) for name, file in costs.GRIDS.items()]


@pytest.mark.parametrize(("name", "result"), GRIDS)
def test_the_budgets_are_what_the_file_says(name: str, result: dict[str, Any]) -> None:
    lines = [x for x in costs.budgets({name: result}).splitlines() if x.startswith(f"| {name} ")]
    assert len(lines) >= 4
    months = result["seconds"] / (730 * 3600)
    for line in lines:
        cells = [cell.strip(" *%").replace(",", "") for cell in line.split("|")[2:-1]]
        host_gib, bucket_gib = (float(cell.removesuffix(" GiB")) for cell in cells[:2])
        (run,) = (
            run
            for run in result["runs"]
            if (run["host_gib"], run["bucket_gib"], run["save"]) == (host_gib, bucket_gib, "all")
        )
        asked, kept = run["requests"], run["kept"]
        puts = (asked["put_new"] + asked["put_exists"]) * 0.005 / 1000 / months
        gets = asked["get_hit"] + asked["get_404"] + asked["get_cancelled"] + kept["heads"]
        copies = kept["refreshes"] + kept["refused"]
        others = gets * 0.0004 + (copies + kept["lists"] + kept["lease_puts"]) * 0.005
        others /= 1000 * months
        storage = run["gib_stored"] * 0.023
        spared = run["tokens"]["bucket"] / 8_000 / 3600 * 3 / months
        told = [float(cell) for cell in cells[3:8]]
        net = spared - puts - others - storage
        assert told == pytest.approx([puts, others, storage, spared, net], abs=2)


@pytest.mark.parametrize(("name", "result"), GRIDS)
def test_what_the_readme_sets_pays_on_either_trace(name: str, result: dict[str, Any]) -> None:
    (verdict,) = (v for v in result["verdicts"] if v["host_gib"] == Setup().host_gib)
    found = zip(result["verdicts"], trace.verdicts(result["runs"]), strict=True)
    assert [recorded | verdict for recorded, verdict in found] == result["verdicts"]
    assert (verdict["bucket_gib"], verdict["save"]) == (Setup().bucket_gib, "all")
    assert verdict["net"] > 0
    assert verdict["net_of_best"] >= 0.85
    assert verdict["hits_of_unbound"] >= 0.9


def test_both_traces_had_the_same_setup_and_grid() -> None:
    first, second = (recorded(file) for file in costs.GRIDS.values())
    assert first["setup"] == second["setup"]
    assert first["trace"] != second["trace"]
    assert first["verdicts"] != second["verdicts"]
    grids = [
        {(run["host_gib"], run["bucket_gib"], run["save"]) for run in result["runs"]}
        for result in (first, second)
    ]
    assert grids[0] == grids[1]


def test_a_kept_bucket_is_near_its_budget_and_near_an_exact_lru() -> None:
    budgets = recorded("bucket-kept.json")["budgets"]
    assert {budget["budget_gib"] for budget in budgets} >= {1000, 4000}
    for budget in budgets:
        ours = budget["runs"]["s3kv"]
        assert ours["peak_of_budget"] <= 1.1
        assert ours["hits_of_ideal"] >= 0.97
        assert ours["usd_per_month"]["sweeping_percent"] <= 2
