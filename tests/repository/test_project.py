"""Rules about the code that no linter of ours can state; the boundaries between its parts hold, and
the contracts that say so can fail."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.project import ROOT

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
    return set(subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True).split())


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


LINT = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as lint; lint()"]

FORBIDDEN = {
    "planning/new.py": "import time, vllm, torch, numpy\nimport s3kv.worker.rank\n",
    "library/pump.py": "import s3kv.library.tiered_store\n",
    "io/client.py": "import s3kv.io.server.service\n",
    "io/sources/bucket.py": "import s3kv.io.sources.other_shards\n",
    "objects/keys.py": "import s3kv.objects.codec\nimport s3kv.stores.store\n",
    "prove/judge.py": "import s3kv.prove.arms\n",
    "stores/http/pool.py": "import s3kv.stores.s3.answers\n",
}
"""Imports that break every contract, by the file they are added to."""


def lint(directory: Path) -> subprocess.CompletedProcess[str]:
    command = [*LINT, "--no-cache"]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)


def test_contracts_hold() -> None:
    done = lint(ROOT)
    assert done.returncode == 0, done.stdout


def test_contracts_can_fail(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "s3kv", tmp_path / "s3kv")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for module, imported in FORBIDDEN.items():
        path = tmp_path / "s3kv" / module
        path.write_text((path.read_text() if path.exists() else "") + "\n" + imported)
    done = lint(tmp_path)
    assert done.returncode == 1
    assert "0 kept, 11 broken" in done.stdout
