"""What a run on one version records: outcomes by area, merged into what is known."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import areas as recorded_areas
from scripts import matrix
from scripts.areas import AREAS, RECORDED, Area, area_of, areas_named, is_within
from scripts.matrix import Cell, Recorder, arguments, record
from tests.project import ROOT

TESTS = """
import pytest

def test_right(): pass
def test_wrong(): assert False
def test_worse(broken): pass
@pytest.mark.skip(reason="newer than vLLM 0.31: a hook")
def test_newer(): pass
@pytest.mark.nightly
def test_long(): assert False
@pytest.mark.nightly
def test_night(): pass
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
    other = Area("other", "", ("test_it.py::test_other", "test_it.py::test_night"), nightly=True)
    found = Area("file", "", ("test_it.py",)), other
    monkeypatch.setattr(recorded_areas, "RECORDED", found)
    return found


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.delitem(sys.modules, "test_it", raising=False)  # that of the test before
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "plain.ini").write_text("[pytest]\nmarkers = nightly\n")
    plain = ["-q", "--import-mode=importlib", "-c", str(tmp_path / "plain.ini")]
    plain += [f"-pno:{name}" for name in ("cacheprovider", "xdist", "asyncio", "timeout")]

    def run(*areas: Area) -> dict[str, Cell]:
        recorder = Recorder(areas)
        pytest.main([*plain, "--rootdir", str(tmp_path), str(tmp_path)], plugins=[recorder])
        return {area.name: cell for area, cell in recorder.cells.items()}

    return run


def test_outcomes_are_sorted_by_area(run: object, areas: tuple[Area, Area]) -> None:
    cells = run(*areas)  # type: ignore[operator]
    assert set(cells) == {"file", "other"}
    cell = cells["file"]
    assert cell.passed == 1
    assert cell.failed == ["test_it.py::test_wrong", "test_it.py::test_worse"]
    assert cell.newer == {"test_it.py::test_newer": "newer than vLLM 0.31: a hook"}
    assert set(cell.skipped) == {"test_it.py::test_elsewhere", "test_it.py::test_known"}
    assert (cells["other"].passed, cells["other"].failed) == (2, [])


@pytest.mark.long
def test_a_file_that_cannot_be_read_fails_every_area_with_a_test_in_it(
    run: object, areas: tuple[Area, Area], tmp_path: Path
) -> None:
    (tmp_path / "test_it.py").write_text("import nothing_of_this_name")
    cells = run(*areas)  # type: ignore[operator]
    assert [cell.failed for cell in cells.values()] == [["test_it.py"], ["test_it.py"]]


def test_an_area_alone_runs_none_of_anothers_tests(run: object, areas: tuple[Area, Area]) -> None:
    cells = run(areas[0])  # type: ignore[operator]
    assert {name: cell.passed for name, cell in cells.items()} == {"file": 1}


@pytest.fixture(scope="module")
def collected() -> list[str]:
    """Every test of the areas' files, as pytest names it."""
    files = sorted({test.partition("::")[0] for area in RECORDED for test in area.tests})
    command = ["-m", "pytest", "--collect-only", "-q", "-m", "nightly or long or not long", *files]
    # Options of the caller's own, such as -v, would change what it prints.
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    told = subprocess.check_output([sys.executable, *command], cwd=ROOT, text=True, env=environment)
    return [line for line in told.splitlines() if "::" in line]


@pytest.mark.long
def test_every_area_names_tests_that_exist_and_none_twice(collected: list[str]) -> None:
    for area in RECORDED:
        for test in area.tests:
            within = [one for one in collected if is_within(one, test)]
            assert any(area_of(one) == area for one in within), test
    asked = arguments(AREAS)
    assert "tests/system/e2e/test_requests.py" in asked
    assert not any(test.startswith("tests/system/e2e/test_requests.py::") for test in asked)
    with pytest.raises(KeyError):
        area_of("tests/unit/test_config.py::test_it")


def test_areas_are_asked_for_by_name_and_runner() -> None:
    quick = areas_named([])
    assert set(AREAS) < set(quick)
    assert not any(area.nightly for area in quick)
    nightly = areas_named(["families"])
    assert {*quick, *nightly} == set(RECORDED)
    assert {area.runner for area in nightly} == {"first", "second", "two ranks"}
    assert [area.runner for area in areas_named(["Gemma 3"])] == ["first", "second", "two ranks"]
    (test,) = areas_named(["Gemma 3"], "second")[0].tests
    assert test.endswith("/test_families.py::test_on_the_second_generation_runner[gemma3]")
    with pytest.raises(KeyError):
        areas_named(["Gemma"])
    with pytest.raises(ValueError, match="second"):
        areas_named(["contract"], "second")


def test_a_run_replaces_its_areas_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
