"""Rules about the code that no linter of ours can state."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCES = sorted((ROOT / "s3kv").rglob("*.py"))
FILE_LINES = 400
FUNCTION_LINES = 50


def functions(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """(name, lines without the docstring) of every function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            first = node.body[0]
            if ast.get_docstring(node) is not None:
                lines -= (first.end_lineno or first.lineno) - first.lineno + 1
            yield node.name, lines


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_and_functions_stay_small(path: Path) -> None:
    source = path.read_text()
    assert source.count("\n") <= FILE_LINES
    too_long = {name: n for name, n in functions(ast.parse(source)) if n > FUNCTION_LINES}
    assert too_long == {}


def imported_by(statement: str) -> set[str]:
    """Top-level modules a fresh interpreter has loaded after `statement`."""
    code = f"{statement}\nimport sys; print(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("statement", "unwanted"),
    [
        ("import s3kv", {"torch", "vllm", "aiobotocore", "asyncio"}),
        # The I/O process starts in a fraction of a second, because of this.
        ("import s3kv.io.__main__", {"torch", "vllm", "numpy", "aiobotocore", "aiohttp"}),
        # vLLM imports every plugin in every process, also where the connector is not configured.
        ("import s3kv.connectors.plugin", {"torch", "aiobotocore"}),
    ],
)
def test_imports_stay_light(statement: str, unwanted: set[str]) -> None:
    loaded = imported_by(statement)
    assert "s3kv" in loaded
    assert loaded & unwanted == set()
