"""What a run on one version records: outcomes by area, merged into what is known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts import matrix
from scripts.matrix import AREAS, Area, Cell, Recorder, area_of, arguments, record
from tests.project import ROOT

TESTS = """
import pytest

def test_right(): pass
def test_wrong(): assert False
def test_worse(broken): pass
@pytest.mark.skip(reason="newer than vLLM 0.29: a hook")
def test_newer(): pass
@pytest.mark.skip(reason="no Ceph")
def test_elsewhere(): pass
@pytest.mark.xfail(strict=True)
def test_known(): assert False
def test_other(): pass

@pytest.fixture
def broken(): raise OSError
"""


@pytest.fixture
def areas(monkeypatch: pytest.MonkeyPatch) -> tuple[Area, Area]:
    found = Area("file", "", ("test_it.py",)), Area("other", "", ("test_it.py::test_other",))
    monkeypatch.setattr(matrix, "AREAS", found)
    return found


@pytest.fixture
def run(tmp_path: Path) -> object:
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "plain.ini").write_text("[pytest]\n")
    others = ("cacheprovider", "xdist", "asyncio", "timeout")
    plain = [
        "-q",
        "--import-mode=importlib",
        "-c",
        str(tmp_path / "plain.ini"),
        *(f"-pno:{name}" for name in others),
    ]

    def run(*areas: Area) -> dict[str, Cell]:
        recorder = Recorder(areas)
        folder = ["--rootdir", str(tmp_path), str(tmp_path)]
        pytest.main([*plain, *folder], plugins=[recorder])
        return recorder.cells

    return run


def test_outcomes_are_sorted_by_area(run: object, areas: tuple[Area, Area]) -> None:
    cells = run(*areas)  # type: ignore[operator]
    assert set(cells) == {"file", "other"}
    cell = cells["file"]
    assert cell.passed == 1
    assert cell.failed == ["test_it.py::test_wrong", "test_it.py::test_worse"]
    assert cell.newer == {"test_it.py::test_newer": "newer than vLLM 0.29: a hook"}
    assert set(cell.skipped) == {"test_it.py::test_elsewhere", "test_it.py::test_known"}
    assert (cells["other"].passed, cells["other"].failed) == (1, [])


def test_an_area_alone_runs_none_of_anothers_tests(run: object, areas: tuple[Area, Area]) -> None:
    cells = run(areas[0])  # type: ignore[operator]
    assert set(cells) == {"file"}
    assert cells["file"].passed == 1


def test_every_area_names_tests_that_exist_and_are_not_asked_for_twice() -> None:
    assert len({(area.name, area.runner) for area in AREAS}) == len(AREAS)
    for area in AREAS:
        for test in area.tests:
            path, _, called = test.partition("::")
            name, _, case = called.rstrip("]").partition("[")
            assert (ROOT / path).exists(), test
            text = (ROOT / path).read_text() if called else ""
            assert not name or f"def {name}(" in text, test
            assert not case or f'"{case}"' in text, test
            one = test if case else f"{test}[one]" if name else f"{test}::test_it"
            assert area_of(one) is area
    asked = arguments(AREAS)
    assert "tests/system/e2e/test_requests.py" in asked
    assert not any(test.startswith("tests/system/e2e/test_requests.py::") for test in asked)
    with pytest.raises(KeyError):
        area_of("tests/unit/test_config.py::test_it")


def test_a_run_replaces_the_cells_of_its_areas_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matrix, "RESULTS", tmp_path / "matrix")
    about = {"vllm": "0.31.0", "build": "CPU build", "torch": "2.13.0", "python": "3.11.2"}
    first, second = [area.name for area in AREAS if area.runner == "first"][:2]
    record([Cell(second, "first", passed=2), Cell(first, "first", failed=["t"])], about, "a")
    path = record([Cell(first, "first", passed=3)], about, "b")
    assert path.name == "0.31.json"
    written = json.loads(path.read_text())
    assert written["vllm"] == "0.31.0"
    kept = [(c["area"], c["passed"], c["failed"], c["commit"]) for c in written["cells"]]
    assert kept == [(first, 3, [], "b"), (second, 2, [], "a")]
