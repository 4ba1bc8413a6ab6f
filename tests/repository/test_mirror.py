"""tests/unit mirrors the package: a module's unit tests are found by its name."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.project import ROOT

UNIT = ROOT / "tests" / "unit"
CONTRACT = ROOT / "tests" / "contract"
SMALL_LINES = 25
"""Most lines of code inside functions that a module may have without a test file."""

UNTESTED = {"io/server/service.py"}
"""Modules without a test file of their name. This list may only shrink."""

BEHAVIOURS = {
    "cli/doctor/test_faults.py",
    "device/test_bytes.py",
    "device/test_group_layouts.py",
    "device/test_schedules.py",
    "host/test_container.py",
    "io/sources/test_compressed_objects.py",
    "io/sources/test_encrypted_objects.py",
    "library/test_calls.py",
    "library/test_library_soak.py",
    "objects/test_format_spec.py",
    "planning/test_ec_machine.py",
    "planning/test_mutants.py",
    "planning/test_near.py",
    "planning/test_neighbours.py",
    "planning/test_slow_bucket.py",
    "planning/test_uses.py",
    "stores/http/test_addresses.py",
    "stores/http/test_ready.py",
    "stores/s3/test_conditional_puts.py",
    "stores/s3/test_put_headers.py",
    "stores/s3/test_sessions.py",
    "stores/s3/test_versions.py",
    "stores/test_stores.py",
}
"""Test files for a behaviour that spans modules. Any other is named after its module."""

MISNAMED: set[str] = set()
"""Test files that still need a module's name. This list may only shrink."""


def code_lines(source: str) -> int:
    """Lines inside functions, without docstrings: tables and interfaces have none."""
    lines: set[int | None] = set()
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for statement in function.body:
                if not (
                    isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
                ):
                    nodes = (n for n in ast.walk(statement) if isinstance(n, ast.stmt | ast.expr))
                    lines |= {number for n in nodes for number in (n.lineno, n.end_lineno)}
    return len(lines)


def modules() -> dict[str, Path]:
    """Every module with code of its own, by its path in the package."""
    return {
        str(path.relative_to(ROOT / "s3kv")): path
        for path in sorted((ROOT / "s3kv").rglob("*.py"))
        if not path.stem.startswith("__") and code_lines(path.read_text()) > SMALL_LINES
    }


def file_of(module: str) -> Path:
    """The test file of a module. Those of the connectors are in tests/contract: they need vLLM."""
    path = Path(module)
    name = f"test_{path.name}"
    if path.parts[0] == "connectors" and not (UNIT / path.parent / name).exists():
        return CONTRACT / name
    return UNIT / path.parent / name


@pytest.mark.parametrize("module", modules())
def test_a_module_has_a_test_file_of_its_name(module: str) -> None:
    wanted = file_of(module)
    assert wanted.is_file() or module in UNTESTED, f"write {wanted.relative_to(ROOT)}"


def test_a_test_file_has_a_module_of_its_name() -> None:
    packaged = {str(p.relative_to(ROOT / "s3kv")) for p in (ROOT / "s3kv").rglob("*.py")}
    without = [
        name
        for path in sorted(UNIT.rglob("test_*.py"))
        if (name := str(path.relative_to(UNIT))) not in BEHAVIOURS | MISNAMED
        and str(Path(name).parent / path.name.removeprefix("test_")) not in packaged
    ]
    assert not without, "rename, merge, or name in BEHAVIOURS what spans several modules"
    assert not [name for name in BEHAVIOURS if not (ROOT / "s3kv" / name).parent.is_dir()]
