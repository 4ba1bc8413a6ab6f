"""Rendered parts of a document that is otherwise written by hand, their tables and results.

A part stands between `<!-- BEGIN name -->` and `<!-- END name -->`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_PART = re.compile(r"(<!-- BEGIN (?P<name>[a-z-]+) -->\n).*?(<!-- END (?P=name) -->)", re.DOTALL)


def filled(document: Path, parts: Mapping[str, str]) -> str:
    """The document as it should be. Raises `ValueError` unless it has exactly these parts."""
    text = document.read_text()
    names = [match["name"] for match in _PART.finditer(text)]
    if sorted(names) != sorted(parts):
        raise ValueError(f"{document} has the parts {names}, and {list(parts)} are rendered")
    return _PART.sub(lambda m: f"{m[1]}\n{parts[m['name']].strip()}\n\n{m[3]}", text)


def recorded(name: str) -> dict[str, Any]:
    """A file of benchmarks/results/."""
    result: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / name).read_text())
    return result


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table in Markdown."""
    lines = ["".join(f" {cell} |" if cell != "" else " |" for cell in row) for row in (head, *rows)]
    lines.insert(1, "---|" * len(head))
    return "\n".join(f"|{line}" for line in lines)
