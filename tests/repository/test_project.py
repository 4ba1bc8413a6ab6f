"""Rules about the code that no linter of ours can state; the boundaries between its parts hold, and
the contracts that say so can fail."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from collections import defaultdict
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


SAME_SUBJECT = {"bucket", "disk", "kv", "ec", "metrics"}
"""Modules of several folders that are about one thing: a connector and its planner, the metrics and
their form in vLLM, the bucket or the disk as a source and its checks."""


def repeated(names: dict[str, list[str]]) -> dict[str, list[str]]:
    return {name: places for name, places in names.items() if len(places) > 1}


def types_named(source: str) -> Iterator[str]:
    """The names of classes and of aliases: whatever is assigned to a name spelt as a class's is."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            yield node.name.lstrip("_")
        elif (
            isinstance(node, ast.Name)
            and isinstance(node.ctx, ast.Store)
            and (spelt := re.fullmatch(r"_*([A-Z]\w*[a-z]\w*)", node.id))
        ):
            yield spelt[1]


def test_classes_and_aliases_are_seen() -> None:
    source = """
class _Job: ...
if TYPE_CHECKING:
    _Order = Fetch | Upload
Speed: TypeAlias = Annotated[float, Meta(ge=1.0)]
Key, T, LIMIT_S = NewType("Key", bytes), TypeVar("T"), 4.0
def made(): size = Speed(1)
"""
    assert sorted(types_named(source)) == ["Job", "Key", "Order", "Speed"]


def test_no_type_name_means_two_things() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in SOURCES:
        for name in types_named(path.read_text()):
            places[name].append(str(path.relative_to(ROOT)))
    assert not repeated(places)


def test_no_module_name_means_two_things() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in SOURCES:
        if not path.stem.startswith("__") and path.stem not in SAME_SUBJECT:
            places[path.stem].append(str(path.relative_to(ROOT)))
    assert not repeated(places)


def test_the_walks_of_the_contributing_guide_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    table = "".join(line for line in text.splitlines() if line.startswith("| "))
    named = {word for word in table.split("`")[1::2] if "/" in word}
    assert len(named) > 15
    missing = [n for n in named if not any((root / n).exists() for root in (ROOT, ROOT / "s3kv"))]
    assert not missing
