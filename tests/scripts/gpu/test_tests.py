"""A test that hangs costs its own result and no other's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.project import ROOT

HANGING = """
import os, sys, time, pytest
def test_first(): assert sys.modules["boto3"] is None  # nobody can import it
@pytest.mark.timeout(1)
def test_hangs(): it_hangs_here()
def it_hangs_here(): time.sleep(1000)
def test_wrong(): assert 1 == 2
def test_dies(): os._exit(7)
def test_skipped(): pytest.skip("no reason")
@pytest.fixture
def broken():
    yield
    raise ValueError("left behind")
def test_leaves_something(broken): pass
def test_last(): pass
"""


def run(folder: Path, program: str, *options: str) -> tuple[int, list[dict[str, Any]], str]:
    """How it ended, the results, and what it said."""
    (folder / "test_these.py").write_text(program)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    timeout: its own\n")
    out = folder / "results.jsonl"
    command = [sys.executable, "-m", "scripts.gpu.tests", "--out", str(out), *options, "--"]
    # As where pytest's plugins are missing.
    command += ["-p", "no:timeout", "-p", "no:xdist", "-c", str(folder / "pytest.ini"), str(folder)]
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONFAULTHANDLER": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    return done.returncode, [line for line in lines if "test" in line], done.stdout + done.stderr


def test_the_tests_behind_one_that_hangs_or_dies_are_run(tmp_path: Path) -> None:
    code, results, said = run(tmp_path, HANGING, "--seconds", "1000", "--limit", "200")
    assert code == 1
    assert {line["test"].partition("::")[2]: line["outcome"] for line in results} == {
        "test_first": "passed",
        "test_hangs": "failed",
        "test_wrong": "failed",
        "test_dies": "failed",
        "test_skipped": "skipped",
        "test_leaves_something": "failed",
        "test_last": "passed",
    }
    texts = {line["test"].partition("::")[2]: line.get("text", "") for line in results}
    assert texts["test_hangs"] == "not over in 1 s"
    assert "1 == 2" in texts["test_wrong"]
    assert texts["test_dies"] == "7"
    assert "left behind" in texts["test_leaves_something"]
    assert "it_hangs_here" in said, "there is no stack of the test that hangs"


def test_all_is_well_if_nothing_has_failed(tmp_path: Path) -> None:
    program = "import pytest\ndef test_a(): pass\ndef test_b(): pytest.skip('why')\n"
    code, results, _ = run(tmp_path, program, "--seconds", "1000")
    assert code == 0
    assert [line["outcome"] for line in results] == ["passed", "skipped"]


@pytest.mark.parametrize(
    ("options", "count"), [(("--seconds", "1000", "--most", "3"), 3), (("--seconds", "0"), 0)]
)
def test_what_never_ran_is_no_success(tmp_path: Path, options: tuple[str, ...], count: int) -> None:
    program = "".join(f"def test_{number}(): assert False\n" for number in range(9))
    code, results, _ = run(tmp_path, program, *options)
    assert code == 1
    assert len(results) == count
