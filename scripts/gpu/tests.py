"""Tests, each with a time limit, where pytest's plugins may be missing:
`python -m scripts.gpu.tests --out FILE --seconds 120 -- ARGUMENTS OF PYTEST`.

Pytest runs in a process of its own, which writes a line of JSON to FILE when a test begins, and one
when it has ended. A test that hangs, or takes the process down, has its line, too, and the tests
behind it run in a new process. Ends with 1 unless all tests have been run and none has failed.

--limit: seconds of a test; one with the mark `timeout` has its own.
--most: failures, after which no other test is run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from scripts.gpu.parts import aborted, kill

START_S = 90.0
"""Of a process that has begun no test: it imports torch and wakes up the GPU."""
_LOOK_S = 0.05
_ABSENT = ("boto3", "moto")
"""Packages that only other tests need. They are missing on a GPU machine, and so in a rehearsal."""


class Results:
    """Written by pytest's process and by this one, and read by both."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, **line: Any) -> None:
        with self._path.open("ab", buffering=0) as file:  # whole lines, also of one that is killed
            file.write(json.dumps(line).encode() + b"\n")

    def read(self) -> tuple[dict[str, str], tuple[str, float] | None]:
        """The outcomes by test, and the test that runs with its limit in seconds."""
        outcomes: dict[str, str] = {}
        running = None
        for text in self._path.read_bytes().split(b"\n")[:-1]:
            line = json.loads(text)
            if "outcome" in line:
                outcomes[line["test"]] = line["outcome"]
                running = None
            else:
                running = line["begins"], line["limit_s"]
        return outcomes, running


class Plugin:
    """In pytest's process: runs the tests that have no outcome yet, and writes how each went."""

    def __init__(self, results: Results, limit_s: float, most: int) -> None:
        self._results = results
        self._limit_s = limit_s
        self._most = most
        self._worst: dict[str, Any] = {}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        outcomes, _ = self._results.read()
        items[:] = [item for item in items if item.nodeid not in outcomes]

    def pytest_runtest_protocol(self, item: Any) -> None:
        mark = item.get_closest_marker("timeout")
        limit_s = mark.args[0] if mark else self._limit_s
        self._worst = {"outcome": "passed", "seconds": 0.0}
        self._results.write(begins=item.nodeid, limit_s=limit_s)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Of the set-up, the test and the clearing up; the first that is not passed counts."""
        self._worst["seconds"] = round(self._worst["seconds"] + report.duration, 2)
        if not report.passed and self._worst["outcome"] == "passed":
            self._worst |= {"outcome": report.outcome, "text": report.longreprtext}
        if report.when == "teardown":
            self._results.write(test=report.nodeid, **self._worst)

    def pytest_runtest_logfinish(self) -> None:
        failed = list(self._results.read()[0].values()).count("failed")
        if failed >= self._most:
            raise KeyboardInterrupt(f"{failed} tests have failed")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--limit", type=float, default=20.0)
    parser.add_argument("--most", type=int, default=20)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("pytest", nargs="+")
    options = parser.parse_args(arguments)
    results = Results(options.out)
    if options.inside:
        import pytest

        for name in _ABSENT:
            sys.modules[name] = None  # type: ignore[assignment]  # an import of it fails
        plugin = Plugin(results, options.limit, options.most)
        return int(pytest.main(options.pytest, plugins=[plugin]))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text("")
    command = [sys.executable, "-m", "scripts.gpu.tests", "--inside", "--out", str(options.out)]
    command += ["--limit", str(options.limit), "--most", str(options.most), "--", *options.pytest]
    return 0 if run(command, results, monotonic() + options.seconds) else 1


def run(command: Sequence[str], results: Results, end_s: float) -> bool:
    """Whether all tests have been run and none has failed."""
    while monotonic() < end_s:
        with subprocess.Popen(command, start_new_session=True) as process:
            why = _watched(process, results, end_s)
        _, running = results.read()
        if running is None:
            # Nothing is left if pytest itself has ended: 0, or 5 if there was no test left.
            left = process.returncode not in (0, 1, 5)
            outcomes = results.read()[0].values()
            counts = {outcome: [*outcomes].count(outcome) for outcome in sorted({*outcomes})}
            print(counts, why or f"pytest has ended with {process.returncode}", flush=True)
            return not why and not left and counts.keys() <= {"passed", "skipped"}
        results.write(test=running[0], outcome="failed", text=why or f"{process.returncode}")
        print(f"{running[0]}: {why or process.returncode}", flush=True)
    return False


def _watched(process: subprocess.Popen[bytes], results: Results, end_s: float) -> str:
    """Wait for the process, and end it where it, or a test, takes too long. Returns the reason;
    empty if it has ended of itself.
    """
    before, since_s = None, monotonic()
    while process.poll() is None:
        sleep(_LOOK_S)
        _, running = results.read()
        if running != before:
            before, since_s = running, monotonic()
        limit_s = running[1] if running else START_S
        if monotonic() - since_s > limit_s or monotonic() > end_s:
            late = monotonic() > end_s
            aborted(process)
            kill(process)
            return "there is no time left" if late else f"not over in {limit_s:g} s"
    return ""


if __name__ == "__main__":
    sys.exit(main())
