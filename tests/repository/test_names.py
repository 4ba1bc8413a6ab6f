"""One name, one thing: no class and no unrelated module of the package shares its name."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

from tests.project import ROOT

SOURCES = sorted((ROOT / "s3kv").rglob("*.py"))
SAME_SUBJECT = {"kv", "ec", "metrics"}
"""Modules of several folders that are about one thing: a connector and its planner, the metrics and
their form in vLLM."""


def repeated(names: dict[str, list[str]]) -> dict[str, list[str]]:
    return {name: places for name, places in names.items() if len(places) > 1}


def test_no_class_name_means_two_things() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(str(path.relative_to(ROOT)))
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


def test_unit_tests_are_laid_out_as_the_package_is() -> None:
    unit = Path(ROOT / "tests" / "unit")
    folders = {str(p.parent.relative_to(unit)) for p in unit.rglob("test_*.py")}
    missing = [folder for folder in folders if not (ROOT / "s3kv" / folder).is_dir()]
    assert not missing
