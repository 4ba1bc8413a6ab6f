"""The simulation of overlaps: its parts against what a hand can work out."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from benchmarks import overlap
from benchmarks.overlap import Case, Fetched, Offer
from tests.benchmarks.test_trace import write_trace

CASE = Case(128, 4 * 256, 256, tokens_per_s=256.0, load_gb_per_s=0.033554432)
"""Four chunks: each takes a second to load, and one to compute; so does the rest."""


def at(*arrived_s: float) -> list[Fetched]:
    return [Fetched(0.0, one_s) for one_s in arrived_s]


def test_the_figures_of_a_case() -> None:
    assert CASE.load_s == pytest.approx(1.0)
    assert (CASE.compute_s, CASE.more_s, CASE.computed_s) == (1.0, 1.0, 5.0)


def test_parts_pass_stages_one_after_another() -> None:
    assert overlap.pipeline([0.0, 0.0, 0.0], 1.0) == 3.0
    assert overlap.pipeline([5.0, 0.0], 1.0) == 7.0
    assert overlap.pipeline([0.0, 0.0, 0.0], 1.0, 2.0) == 7.0
    assert overlap.pipeline([0.0, 0.0, 0.0], 2.0, 1.0) == 7.0


def test_the_ways_of_one_offer() -> None:
    fetched, whole = at(1.0, 2.0, 3.0, 4.0), Offer(4.0, 4)
    assert overlap.by_rule(whole, CASE) == pytest.approx(4 + 4 + 1)
    assert overlap.in_parts(fetched, whole, CASE) == pytest.approx(5 + 1)
    assert overlap.by_layer(whole, CASE) == pytest.approx(4 + 4 + 1 / overlap.LAYERS)
    half = Offer(2.0, 2)
    assert overlap.by_rule(half, CASE) == pytest.approx(2 + 2 + 2 + 1)
    assert overlap.in_parts(fetched, half, CASE) == pytest.approx(3 + 2 + 1)
    assert overlap.in_parts(fetched, Offer(9.0, 2), CASE) == pytest.approx(9 + 2 + 1)


def test_layers_are_computed_while_later_ones_are_on_the_wire() -> None:
    groups_s = [float(number + 1) for number in range(overlap.GROUPS)]
    ends_s = overlap.GROUPS + (4 + 1) / overlap.GROUPS
    assert overlap.over_the_wire(groups_s, CASE) == pytest.approx(ends_s)


def test_computing_and_fetching_meet() -> None:
    quick = Case(128, 4 * 256, 256, tokens_per_s=256.0, load_gb_per_s=1e9)
    met_s, front = overlap.from_both_ends(at(1.0, 2.0, 3.0, 4.0), quick)
    assert (met_s, front) == (pytest.approx(2 + 1), 2)
    assert overlap.from_both_ends(at(9.0, 9.0, 9.0, 9.0), quick) == (5.0, 4)
    assert overlap.from_both_ends(at(0.1, 0.1, 0.1, 0.1), quick)[1] == 0


def test_the_rule_offers_what_has_arrived_when_the_rest_is_late() -> None:
    def warm() -> overlap.Pace:
        pace = overlap.pace_of(CASE)
        for _ in range(20):
            pace.fetched(0.5, began_with=4, ended_with=1)
        return pace

    assert overlap.offer(at(0.5, 0.5, 0.5, 0.5), CASE, warm()) == Offer(0.5, 4)
    assert overlap.offer(at(0.9, 0.5, 0.5, 0.5), CASE, warm()) == Offer(0.9, 4)
    late = overlap.offer(at(0.5, 0.5, 9.0, 0.5), CASE, warm())
    assert late.ready == 2
    assert 0.5 <= late.at_s < 4.0  # within the time to compute the chunks


def test_late_reads_are_sent_again_within_the_budget() -> None:
    """Of many first bytes, far fewer than one in a hundred are later than twice the threshold."""
    wire = overlap.Wire(random.Random(0))
    times = [wire._first_byte_s() for _ in range(5_000)]
    late_s = wire._lateness.late_s(overlap.AT_ONCE)
    rng = random.Random(1)
    alone = [overlap.NETWORK.latency_s(rng) for _ in range(5_000)]
    assert 3 * sum(one > 2 * late_s for one in times) < sum(one > 2 * late_s for one in alone)


def test_the_quick_benchmark_ends(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace.jsonl")
    overlap.main(["--quick", "--trace", str(trace), "--json", str(tmp_path / "result")])
    result = json.loads((tmp_path / "result").read_text())
    counted = [result["summary"][kind]["cases"] for kind in ("offered", "computed")]
    assert sum(counted) == len(result["cases"]) == len(overlap.CASES)
    assert set(result["fleet"]["runs"]) == {"as it is", "loads in no time"}
