"""The package stays small enough to be read: lines, files, and lengths of functions."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.project import ROOT
from tests.repository.test_project import functions

MOST_LINES, GOAL_LINES = 27_300, 18_500
MOST_FILES, GOAL_FILES = 151, 125
LONG_FUNCTION_LINES = 20


def sources() -> list[Path]:
    return sorted((ROOT / "s3kv").rglob("*.py"))


def test_lines_and_files(capsys: pytest.CaptureFixture[str]) -> None:
    files, lines = len(sources()), sum(path.read_text().count("\n") for path in sources())
    said = f"{lines:,} lines (goal: {GOAL_LINES:,}) in {files} files (goal: {GOAL_FILES})"
    with capsys.disabled():
        print(f"\ns3kv has {said}")
    assert lines <= MOST_LINES, said
    assert files <= MOST_FILES, said


def test_nine_of_ten_functions_are_short(capsys: pytest.CaptureFixture[str]) -> None:
    lengths = sorted(n for path in sources() for _, n in functions(ast.parse(path.read_text())))
    length = lengths[len(lengths) * 9 // 10]
    with capsys.disabled():
        print(f"\nnine of ten functions have at most {length} lines")
    assert length <= LONG_FUNCTION_LINES
