"""Which tests wait for the night, how long they take, and how a night is cut into parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest

MINUTES = {
    "tests/system/e2e/test_families.py": 60,
    "tests/system/e2e/test_hosts.py": 30,
    "tests/system/faults/test_matrix.py": 40,
    "tests/system/infra/test_mistakes.py": 40,
    "tests/system/kills/test_kills.py": 60,
    "tests/system/sim/test_simulation.py": 125,
}
"""Estimates for two cores. A file without one takes `MINUTES_PER_TEST` for each of its tests."""

MINUTES_PER_TEST = 0.5


def some_by_day(cases: Sequence[Any], count: int) -> list[Any]:
    """The parameters of a test: `count` of the cases, evenly spread, run for every change, the
    others nightly. A case is called by its function's name; one of several values, by the first's.
    """
    by_day = {len(cases) * i // count for i in range(count)}
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            id=(case[0] if isinstance(case, tuple) else case).__name__,
            marks=() if number in by_day else pytest.mark.nightly,
        )
        for number, case in enumerate(cases)
    ]


class Night:
    """A pytest plugin: says how long the chosen tests take, and leaves out those of other parts.

    part: "2/4", the second of four; a file is in one part with all its tests.
    """

    def __init__(self, part: str) -> None:
        self._number, self._parts = map(int, part.split("/"))

    @pytest.hookimpl(trylast=True)  # after the choice by marks
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        minutes_of = minutes(file_of(item) for item in items)
        ours = cut(minutes_of, self._parts)[self._number - 1]
        config.hook.pytest_deselected(items=[i for i in items if file_of(i) not in ours])
        items[:] = [item for item in items if file_of(item) in ours]

    def pytest_report_collectionfinish(self, items: list[pytest.Item]) -> str:
        total = sum(minutes(file_of(item) for item in items).values())
        return f"part {self._number} of {self._parts}: about {total:.0f} minutes on two cores"


def file_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def minutes(files: Iterable[str]) -> dict[str, float]:
    """How long the tests of each file take together. files: one name for each test."""
    tests = Counter(files)
    return {name: MINUTES.get(name, MINUTES_PER_TEST * count) for name, count in tests.items()}


def cut(minutes_of: Mapping[str, float], parts: int) -> list[list[str]]:
    """The files in so many parts of about the same length; the same parts every time."""
    found: list[list[str]] = [[] for _ in range(parts)]
    for name in sorted(minutes_of, key=lambda name: (-minutes_of[name], name)):
        min(found, key=lambda part: sum(map(minutes_of.__getitem__, part))).append(name)
    return found
