"""The table of what has been run: a row is true by what is there, not by what somebody writes."""

from __future__ import annotations

from pathlib import Path

from scripts import compatibility
from scripts.compatibility import CONTINUOUS
from tests.project import ROOT


def state(what: str, root: Path) -> str:
    (line,) = [
        line for line in compatibility.status([], root).splitlines() if line.startswith(f"| {what}")
    ]
    return line.strip("| ").split(" | ")[1]


def test_without_evidence_nothing_has_run(tmp_path: Path) -> None:
    for claim in compatibility.CLAIMS:
        assert "not yet run" in state(claim.what, tmp_path)


def test_the_first_result_of_a_gpu_changes_its_row(tmp_path: Path) -> None:
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    (results / "gpu-copies.json").touch()
    assert state("GPUs", tmp_path) == "run"
    assert "not yet run" in state("AWS S3", tmp_path)


def test_today_nothing_has_run_on_a_gpu_and_ceph_has() -> None:
    assert "not yet run" in state("GPUs", ROOT)
    assert state("Ceph", ROOT).startswith("run")


def test_a_version_says_how_much_of_it_has_run() -> None:
    cells = [{"runner": "–", "passed": 1400}, {"runner": "first", "passed": 2}]
    results = [{"vllm": "0.31.0", "cells": cells}, {"vllm": CONTINUOUS, "cells": cells}]
    told = compatibility.status(results)
    assert f"run with every change: {CONTINUOUS}; run in part: 0.31.0 (1,402 tests) |" in told
    assert f"interpreted kernels | run with every change: {CONTINUOUS} |" in told


def test_a_runner_counts_its_own_tests() -> None:
    cells = [{"runner": "first", "passed": 7}, {"runner": "second", "passed": 1}]
    told = compatibility.status([{"vllm": "0.31.0", "cells": cells}])
    always = f"run with every change: {CONTINUOUS}; run in part:"
    assert f"first-generation model runner | {always} 0.31.0 (7 tests) |" in told
    assert (
        f"second-generation model runner, interpreted kernels | {always} 0.31.0 (1 test) |" in told
    )
