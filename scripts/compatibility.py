"""The tables of docs/compatibility.md: versions and families, as `scripts.matrix` recorded them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from scripts.areas import AREAS, FAMILIES, Area
from scripts.marks import filled, table
from scripts.matrix import RESULTS, ROOT

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
    versions = "\n\n".join((counts(results), beneath(results)))
    parts = {"status": status(results), "versions": versions, "families": families(results)}
    return filled(ROOT / "docs" / "compatibility.md", parts)


def counts(results: list[Result]) -> str:
    """How many tests of each area have passed on each version."""
    rows = []
    for area in AREAS:
        cells = [_counts(result["vllm"], _cell(result, area)) for result in results]
        rows.append((area.told, area.runner, *cells))
    return table(("what", "runner", *(result["vllm"] for result in results)), rows)


def families(results: list[Result]) -> str:
    """On which versions the models of each family have run, by runner and ranks."""
    heads = ("family", "layers", "first runner", "second runner, interpreted", "two tensor ranks")
    rows = []
    for family in FAMILIES:
        cells = [_versions(results, area) for area in family.areas]
        if family.instead:
            cells = [f"{family.instead}: {cells[0]}", "the same", "the same"]
        rows.append((family.name, family.layers, *cells))
    return table(heads, rows)


def _versions(results: list[Result], area: Area) -> str:
    """The versions on which an area has passed, and in bold those on which it has failed."""
    cells = {result["vllm"]: _cell(result, area) for result in results}
    passed = _short(
        v for v, cell in cells.items() if cell and cell["passed"] and not cell["failed"]
    )
    failed = _short(v for v, cell in cells.items() if cell and cell["failed"])
    return ", ".join(filter(None, (passed, failed and f"**fails: {failed}**"))) or NOT_RUN


def _short(versions: Iterable[str]) -> str:
    return ", ".join(version.removesuffix(".0") for version in versions)


def beneath(results: list[Result]) -> str:
    """What the table cannot show: builds, commits, and what each version does not have."""
    lines = []
    for result in results:
        commits = sorted({cell["commit"] for cell in result["cells"]})
        ran = f"{result['build']}, torch {result['torch']}, s3kv at {', '.join(commits)}"
        lines.append(f"- **{result['vllm']}**: {ran}.")
        if lacking := _lacking(*result["cells"]):
            lines.append(f"  Skipped, because this version lacks: {', '.join(lacking)}.")
        lines += [
            f"  Failed: `{test}`." for cell in result["cells"] for test in sorted(cell["failed"])
        ]
    return "\n".join(lines)


def _cell(result: Result, area: Area) -> dict[str, Any] | None:
    return next((c for c in result["cells"] if (c["area"], c["runner"]) == area.key), None)


def _counts(version: str, cell: dict[str, Any] | None) -> str:
    if cell is None:
        return "with every change" if version == CONTINUOUS else NOT_RUN
    ran = cell["passed"] + len(cell["failed"])
    if cell["failed"]:
        return f"**{len(cell['failed'])} of {ran} failed**"
    return f"{ran} passed" if ran else f"lacks {', '.join(_lacking(cell))}"


def _lacking(*cells: dict[str, Any]) -> list[str]:
    """What a version does not have of what tests ask for."""
    reasons = {why for cell in cells for why in cell["newer"].values()}
    return sorted(why.partition(": ")[2] for why in reasons)


def status(results: list[Result]) -> str:
    """What has run on each runner. results: the runs on versions of vLLM, the oldest first."""
    named = {
        "first": "vLLM on a CPU, first-generation model runner",
        "second": "the same, second-generation model runner, interpreted kernels",
    }
    return table(("", "state"), [(told, _ran(results, runner)) for runner, told in named.items()])


def _ran(results: list[Result], runner: str) -> str:
    """What has run on this runner; tests that start no engine count with the first."""
    told = []
    for result in results:
        cells = [c for c in result["cells"] if (c["runner"] == "second") == (runner == "second")]
        passed = sum(cell["passed"] for cell in cells)
        if passed and result["vllm"] != CONTINUOUS:
            told.append(f"{result['vllm']} ({passed:,} test{'s' if passed > 1 else ''})")
    part = f"; run in part: {', '.join(told)}" if told else ""
    return f"run with every change: {CONTINUOUS}{part}"
