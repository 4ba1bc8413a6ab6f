"""A benchmark always ends, and says where it was if it did not end by itself."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.project import ROOT

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
