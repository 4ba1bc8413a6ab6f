"""One name, one thing: no type and no unrelated module of the package shares its name."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator

from tests.project import ROOT

SOURCES = sorted((ROOT / "s3kv").rglob("*.py"))
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
