"""The tables of versions in docs/compatibility.md and, through `scripts.status`, README.md.

They show what `scripts.matrix` has recorded.
"""

from __future__ import annotations

import json
from typing import Any

from scripts.marks import filled
from scripts.matrix import AREAS, RESULTS, ROOT, Area

Result = dict[str, Any]
"""A file of `RESULTS`: one version of vLLM, and a cell for each area that has run on it."""

NOT_RUN = "not run"
CONTINUOUS = "0.32.0"
"""The version that scripts/install_engine.sh takes unasked: every change has to pass on it."""


def recorded() -> list[Result]:
    """Every version that has run, the oldest first."""
    results: list[Result] = [json.loads(path.read_text()) for path in RESULTS.glob("*.json")]
    return sorted(results, key=lambda result: [int(part) for part in result["vllm"].split(".")])


def page() -> str:
    """docs/compatibility.md."""
    results = recorded()
    parts = "\n\n".join((table(results), beneath(results)))
    return filled(ROOT / "docs" / "compatibility.md", {"versions": parts})


def table(results: list[Result]) -> str:
    """How many tests of each area have passed on each version."""
    return _rows(results, ("what", "runner"), lambda a: (a.told, a.runner), _counts)


def summary(results: list[Result]) -> str:
    """The same in a word each."""
    return _rows(results, ("",), lambda a: (a.told,), _word)


def beneath(results: list[Result]) -> str:
    """What the table cannot show: builds, commits, and what each version does not have."""
    lines = []
    for result in results:
        commits = sorted({cell["commit"] for cell in result["cells"]})
        ran = f"{result['build']}, torch {result['torch']}, s3kv at {' and '.join(commits)}"
        lines.append(f"- **{result['vllm']}**: {ran}.")
        if lacking := _lacking(*result["cells"]):
            lines.append(f"  Skipped, because it lacks it: {', '.join(lacking)}.")
        lines += [
            f"  Failed: `{test}`." for cell in result["cells"] for test in sorted(cell["failed"])
        ]
    return "\n".join(lines)


def _rows(results: list[Result], heads: tuple[str, ...], begin: Any, told: Any) -> str:
    versions = [result["vllm"] for result in results]
    lines = [f"| {' | '.join((*heads, *versions))} |", "|---" * (len(heads) + len(versions)) + "|"]
    for area in AREAS:
        cells = [told(result["vllm"], _cell(result, area)) for result in results]
        lines.append(f"| {' | '.join((*begin(area), *cells))} |")
    return "\n".join(lines)


def _cell(result: Result, area: Area) -> dict[str, Any] | None:
    key = (area.name, area.runner)
    return next((c for c in result["cells"] if (c["area"], c["runner"]) == key), None)


def _counts(version: str, cell: dict[str, Any] | None) -> str:
    if cell is None:
        return "with every change" if version == CONTINUOUS else NOT_RUN
    ran = cell["passed"] + len(cell["failed"])
    if cell["failed"]:
        return f"**{len(cell['failed'])} of {ran} failed**"
    return f"{ran} passed" if ran else f"lacks {', '.join(_lacking(cell))}"


def _word(version: str, cell: dict[str, Any] | None) -> str:
    if cell is None:
        return "tested" if version == CONTINUOUS else NOT_RUN
    if cell["failed"]:
        return "**fails**"
    return "tested" if cell["passed"] else "–"


def _lacking(*cells: dict[str, Any]) -> list[str]:
    """What a version does not have of what tests ask for."""
    reasons = {why for cell in cells for why in cell["newer"].values()}
    return sorted(why.partition(": ")[2] for why in reasons)
