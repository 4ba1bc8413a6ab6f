"""What the documentation shows of benchmarks was measured with the code that is here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import origin
from scripts import costs, marks, results
from tests.project import ROOT

RESULTS = ROOT / "benchmarks" / "results"

MOVED = "code has moved and texts have changed since, and nothing of what is measured"
NO_THREADS = "the threads of the network have changed since, and two cores have none"
PLAIN = "objects may be compressed since then, and these were plain, as they would be now"
OLDER: dict[str, str] = {
    "compressed.json": "measured while coding held the GIL; to be measured on a faster machine",
    "compression.json": "measured in one thread, whose speed does not depend on the GIL",
    "engine-shaped.json": PLAIN,
    "gpu-h200.json": "each part names its commit: there is not a GPU for every change",
    "peers-disk.json": PLAIN,
    "peers-weed.json": NO_THREADS,
    "peers-shaped.json": "since then the tier saves the chunks behind the first probes, too",
    "planner.json": "in turns with the code before it, no row moved by more than the noise",
    "trace-compression.json": MOVED,
    "trace-disk.json": MOVED,
    "trace-session.json": MOVED,
}
"""Results that the documentation shows though the code they measure has changed since, and why that
is accepted. A change that makes a result older names it here, or measures again."""


@pytest.fixture(scope="module")
def shown() -> set[str]:
    """The results that the documentation shows."""
    names: set[str] = set()
    recorded = marks.recorded

    def noted(name: str) -> dict[str, Any]:
        names.add(name)
        return recorded(name)

    with pytest.MonkeyPatch.context() as patch:
        for module in (costs, results):
            patch.setattr(module, "recorded", noted)
        for render in (costs.page, results.page, results.peers_page, results.readme):
            render()
        return names


def changed(name: str) -> list[str] | None:
    """Paths that have changed since the result; None if it does not say."""
    result = json.loads((RESULTS / name).read_text())
    return origin.changed(result) if "code" in result else None


def test_no_result_that_is_shown_is_of_other_code(shown: set[str]) -> None:
    stale = {name: changed(name) for name in sorted(shown - OLDER.keys())}
    stale = {name: paths for name, paths in stale.items() if paths or paths is None}
    assert not stale, f"measure again, or name them in OLDER with a reason: {stale}"


def test_no_result_is_called_older_without_need(shown: set[str]) -> None:
    assert shown >= OLDER.keys()
    fresh = [name for name in OLDER if changed(name) == []]
    assert not fresh, f"take them off the list: {fresh}"
    assert all(OLDER.values())


def test_all_that_is_measured_exists() -> None:
    paths = {path for measured in origin.MEASURED.values() for path in measured}
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


def test_a_change_of_what_is_measured_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(origin, "ROOT", tmp_path)
    monkeypatch.setattr(origin, "MEASURED", {"one": ("kept", "file.py")})
    (tmp_path / "kept").mkdir()
    for path in ("kept/a.py", "kept/notes.txt", "file.py", "other.py"):
        (tmp_path / path).write_text("1")
    result = {"benchmark": "one", "code": origin.code("one")}
    for path in ("kept/notes.txt", "other.py"):
        (tmp_path / path).write_text("2")
    assert origin.changed(result) == []
    (tmp_path / "kept/a.py").write_text("2")
    assert origin.changed(result) == ["kept"]
    (tmp_path / "kept/a.py").write_text("1")
    (tmp_path / "kept/b.py").write_text("")
    (tmp_path / "file.py").write_text("1 ")
    assert origin.changed(result) == ["file.py", "kept"]
    assert origin.changed({"benchmark": "one", "code": {}}) == ["file.py", "kept"]


def test_a_published_result_says_where_it_comes_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks import rig

    rig.publish({"benchmark": "engine", "measured": 1}, tmp_path / "result.json")
    result = json.loads((tmp_path / "result.json").read_text())
    assert json.loads(capsys.readouterr().out) == result
    assert result["commit"] == origin.commit()
    assert origin.changed(result) == []
    assert all(speed > 0 for speed in result["computing"].values())
