"""All benchmarks run by one command, whose page tells their results and failures; and each always
ends, and says where it was if it did not end by itself."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import report
from tests.project import ROOT


def test_results_failures_and_what_is_left_out_are_on_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails = report.Program("engine", quick=("--no-such-option",))
    monkeypatch.setattr(report, "PROGRAMS", (report.Program("planner", quick=()), fails))
    with pytest.raises(SystemExit):
        report.main(["--out", str(tmp_path), "trace"])
    assert report.main(["--quick", "--out", str(tmp_path)]) == 1
    page = (tmp_path / "index.md").read_text()
    assert "arrival_nothing_known" in page or "a repeated lookup" in page
    assert "**failed with 2**" in page
    assert (tmp_path / "planner.json").exists()
    assert not (tmp_path / "engine.json").exists()


def test_a_benchmark_on_a_trace_is_left_out_without_one(tmp_path: Path) -> None:
    assert report.main(["--out", str(tmp_path), "trace"]) == 0
    assert (tmp_path / "index.md").read_text().count("left out: it needs --trace") == 1


def test_the_names_are_benchmarks() -> None:
    for program in report.PROGRAMS:
        folder = ROOT / "benchmarks" / program.name
        assert folder.with_suffix(".py").exists() or (folder / "__main__.py").exists()
        assert program.about


def test_nested_figures_are_told_by_their_names() -> None:
    result = {"commit": "1", "rows": {"get": {"ms": 3}}, "runs": [{"a": [1, 2]}]}
    assert dict(report.leaves(result)) == {"rows, get, ms": 3, "runs 1, a": "1, 2"}


def test_a_server_and_a_trace_are_passed_on(tmp_path: Path) -> None:
    import argparse

    options = argparse.Namespace(quick=True, shaped=True, trace=tmp_path / "t")
    by_name = {program.name: program for program in report.PROGRAMS}
    told = by_name["engine"].command(options)[1:]
    assert told == ["-m", "benchmarks.engine", "--quick", "--shaped"]
    assert by_name["trace"].command(options)[3:] == ["--quick", "--trace", str(tmp_path / "t")]
    assert sys.executable == by_name["planner"].command(options)[0]


HANGS = """
import time
from benchmarks.deadline import begin, ends

@ends({})
def main():
    {}
    time.sleep(1000)

main()
"""


@pytest.mark.parametrize(
    ("give_up_s", "begins"),
    [(0.1, "pass"), (1000, 'begin("a server", 0.1)')],
    ids=["early", "late"],
)
def test_a_benchmark_that_hangs_is_ended(give_up_s: float, begins: str) -> None:
    command = [sys.executable, "-c", HANGS.format(give_up_s, begins)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert ended.returncode == 1
    assert ("server: a server" in ended.stderr) == ("begin" in begins)
    assert "in main" in ended.stderr


def programs() -> list[Path]:
    folder = ROOT / "benchmarks"
    paths = [*folder.glob("*.py"), *folder.glob("*/__main__.py")]
    is_server = folder / "shaped.py"
    named = {folder / "__main__.py", is_server}
    return [p for p in paths if 'if __name__ == "__main__"' in p.read_text() and p not in named]


@pytest.mark.parametrize("path", programs(), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_benchmark_ends(path: Path) -> None:
    (main,) = (
        node
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == "main"
    )
    decorators = [ast.unparse(decorator) for decorator in main.decorator_list]
    assert [decorator.partition("(")[0] for decorator in decorators] == ["ends"]
