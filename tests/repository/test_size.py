"""The package stays small enough to be read: its lines, and the lengths of its functions."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.project import ROOT
from tests.repository.test_project import functions

MOST_LINES = 30_299
"""Lines of `s3kv/`. A change may lower the number, and may not raise it."""
LONG_FUNCTION_LINES = 20
MOST_TEST_LINES = 64_421
"""Lines of `tests/`. The same goes for them."""


def sources(folder: str = "s3kv") -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize(("folder", "most"), [("s3kv", MOST_LINES), ("tests", MOST_TEST_LINES)])
def test_lines(folder: str, most: int, capsys: pytest.CaptureFixture[str]) -> None:
    lines = sum(path.read_text().count("\n") for path in sources(folder))
    with capsys.disabled():
        print(f"\n{folder} has {lines:,} lines in {len(sources(folder))} files")
    assert lines <= most


def test_nine_of_ten_functions_are_short(capsys: pytest.CaptureFixture[str]) -> None:
    lengths = sorted(n for path in sources() for _, n in functions(ast.parse(path.read_text())))
    length = lengths[len(lengths) * 9 // 10]
    with capsys.disabled():
        print(f"\nnine of ten functions have at most {length} lines")
    assert length <= LONG_FUNCTION_LINES
