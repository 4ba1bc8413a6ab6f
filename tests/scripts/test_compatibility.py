"""The tables of compatibility: what they show of a result, and that every version has one."""

from __future__ import annotations

import re
from typing import Any

from packaging.requirements import Requirement

from scripts import compatibility
from scripts.areas import AREAS, FAMILIES, RECORDED
from tests.project import ROOT, extras


def cell(area: str, runner: str = "", **told: Any) -> dict[str, Any]:
    empty = {"passed": 0, "failed": [], "newer": {}, "skipped": {}}
    runner = runner or {area.name: area.runner for area in AREAS}[area]
    return {"area": area, "runner": runner, "commit": "c0ffee"} | empty | told


def result(version: str, *cells: dict[str, Any]) -> compatibility.Result:
    return {"vllm": version, "build": "CPU build", "torch": "2.13.0", "cells": list(cells)}


FIRST, SECOND, THIRD = (area.name for area in AREAS[:3])
OLD = result(
    "0.31.0",
    cell(FIRST, passed=7, newer={"t::a": "newer than vLLM 0.31: a hook"}),
    cell(SECOND, passed=1, failed=["t::b"]),
    cell(THIRD, newer={"t::c": "newer than vLLM 0.31: images"}),
)
NEW = result("0.33.0", cell(FIRST, passed=8))
ALWAYS = f"run with every change: {compatibility.CONTINUOUS}"


def test_a_cell_says_how_many_tests_have_passed() -> None:
    lines = compatibility.counts([OLD, NEW]).splitlines()
    heads, _, *rows = (line.strip("| ").split(" | ")[-2:] for line in lines)
    assert heads == ["0.31.0", "0.33.0"]
    assert rows[0] == ["7 passed", "8 passed"]
    assert rows[1] == ["**1 of 2 failed**", "not run"]
    assert rows[2] == ["lacks images", "not run"]
    assert all(row == ["not run", "not run"] for row in rows[3:])
    assert len(rows) == len(AREAS)


def test_a_family_has_the_versions_it_ran_on_by_runner_and_ranks() -> None:
    older = result(
        "0.31.0",
        cell("tiers", passed=2),
        cell("Gemma 3", "first", passed=1),
        cell("Gemma 3", "second", failed=["t"], passed=1),
        cell("DeepSeek-V4", "–", passed=1),
    )
    newer = result("0.32.0", cell("Gemma 3", "first", passed=1), cell("Gemma 3", "second"))
    told = compatibility.families([older, newer])
    heads, _, *lines = (line.strip("| ").split(" | ") for line in told.splitlines())
    assert len(heads) == 5
    rows = {name: cells for name, _, *cells in lines}
    assert list(rows) == [family.name for family in FAMILIES]
    assert rows["Llama"] == ["not run", "0.31", "not run"]
    assert rows["Gemma 3"] == ["0.31, 0.32", "**fails: 0.31**", "not run"]
    assert rows["DeepSeek-V4"] == ["refused at start: 0.31", "the same", "the same"]


def test_every_family_has_a_cell_for_each_runner_or_one_that_says_why_not() -> None:
    for family in FAMILIES:
        runners = [area.runner for area in family.areas]
        assert runners == (["–"] if family.instead else ["first", "second", "two ranks"])
    assert len({area.key for area in RECORDED}) == len(RECORDED)


def test_the_version_that_every_change_runs_on_needs_no_record() -> None:
    assert "| with every change |" in compatibility.counts([result(compatibility.CONTINUOUS), NEW])
    (default,) = re.findall(r"VLLM:-(.*?)}", (ROOT / "scripts/install_engine.sh").read_text())
    assert f"{default}.0" == compatibility.CONTINUOUS


def test_what_a_version_lacks_and_what_failed_is_named() -> None:
    told = compatibility.beneath([OLD, NEW])
    assert "**0.31.0**: CPU build, torch 2.13.0, s3kv at c0ffee." in told
    assert "because this version lacks: a hook, images." in told
    assert "Failed: `t::b`." in told


def test_every_supported_version_has_a_result_and_none_has_failed() -> None:
    (supported,) = (Requirement(text).specifier for text in extras()["vllm"])
    recorded = compatibility.recorded()
    have = {result["vllm"].rpartition(".")[0] for result in recorded}
    assert have == {f"0.{n}" for n in range(200) if f"0.{n}.0" in supported}
    failed = [test for result in recorded for cell in result["cells"] for test in cell["failed"]]
    assert failed == []


def test_the_range_that_is_told_is_the_one_that_has_run() -> None:
    versions = [result["vllm"].rpartition(".")[0] for result in compatibility.recorded()]
    told = f"{versions[0]} to {versions[-1]}"
    for document in ("README.md", "docs/quickstart.md", "docs/compatibility.md"):
        assert re.search(rf"vLLM\W+{re.escape(told)}\b", (ROOT / document).read_text()), document
    (made,) = re.findall(r"^VERSION \?= (.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert made.split() == versions


def test_a_version_says_how_much_of_it_has_run() -> None:
    cells = [{"runner": "–", "passed": 1400}, {"runner": "first", "passed": 2}]
    versions = ("0.31.0", compatibility.CONTINUOUS)
    told = compatibility.status([{"vllm": version, "cells": cells} for version in versions])
    assert f"{ALWAYS}; run in part: 0.31.0 (1,402 tests) |" in told
    assert f"interpreted kernels | {ALWAYS} |" in told


def test_a_runner_counts_its_own_tests() -> None:
    cells = [{"runner": "first", "passed": 7}, {"runner": "second", "passed": 1}]
    told = compatibility.status([{"vllm": "0.31.0", "cells": cells}])
    part = f"{ALWAYS}; run in part: 0.31.0"
    assert f"first-generation model runner | {part} (7 tests) |" in told
    assert f"second-generation model runner, interpreted kernels | {part} (1 test) |" in told
