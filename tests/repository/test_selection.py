"""Which tests a change runs, how a night is cut into parts, and groups that stay in one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import changes
from tests.nightly import cut, minutes
from tests.project import ROOT, plant


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty project with one commit on main."""
    monkeypatch.setattr(changes, "ROOT", tmp_path)
    git(tmp_path, "init", "--initial-branch", "main")
    commit(tmp_path, "README.md")
    return tmp_path


def git(folder: Path, *arguments: str, at_h: int = 0) -> None:
    who = ["-c", "user.name=s3kv", "-c", "user.email=s3kv@example.org"]
    time = {"GIT_COMMITTER_DATE": f"2026-01-{1 + at_h // 24:02}T{at_h % 24:02}:00:00Z"}
    command = ["git", *who, *arguments]
    subprocess.run(command, cwd=folder, env=os.environ | time, check=True, capture_output=True)


def commit(folder: Path, name: str, at_h: int = 0) -> None:
    plant(folder, {name: name})
    git(folder, "add", "--all")
    git(folder, "commit", "--message", name, at_h=at_h)


def run_for(checkout: Path) -> set[str]:
    return set(changes.PARTS) - set(changes.untouched())


def test_the_table_names_what_exists() -> None:
    for part, subject in changes.PARTS.items():
        assert (ROOT / part).exists()
        assert [path for path in subject if not list(ROOT.glob(path))] == []


def test_without_a_commit_to_compare_with_all_run(checkout: Path) -> None:
    assert run_for(checkout) == set(changes.PARTS)


def test_on_main_commits_that_are_pushed_together_count(checkout: Path) -> None:
    commit(checkout, "terraform/main.tf", at_h=13)
    assert run_for(checkout) == {"tests/system/deploy", "tests/system/infra"}
    commit(checkout, "s3kv/worker/outbox.py", at_h=20)
    assert run_for(checkout) == {"tests/system/deploy", "tests/system/infra"}
    commit(checkout, "s3kv/worker/rank.py", at_h=40)
    assert run_for(checkout) == set()


def test_on_a_branch_all_commits_and_all_edits_count(checkout: Path) -> None:
    git(checkout, "switch", "--create", "topic")
    commit(checkout, "mkdocs.yml")
    commit(checkout, "s3kv/worker/outbox.py")
    assert run_for(checkout) == {"tests/system/site"}
    plant(checkout, {"tests/system/infra/test_new.py": "new"})
    assert run_for(checkout) == {"tests/system/site", "tests/system/infra"}
    plant(checkout, {"Makefile": "new"})
    assert run_for(checkout) == set(changes.PARTS)


def test_outside_of_a_checkout_all_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "ROOT", tmp_path)
    assert changes.untouched() == []


def test_parts_are_of_a_length_and_hold_each_file_once() -> None:
    minutes_of = minutes(["a"] * 60 + ["b"] * 20 + ["c"] * 20 + ["d"] * 22)
    assert cut(minutes_of, 2) == [["a"], ["d", "b", "c"]]
    assert sorted(name for part in cut(minutes_of, 3) for name in part) == ["a", "b", "c", "d"]


TESTS = """
import os, pathlib, pytest

@pytest.mark.parametrize("number", range(6))
def test(number):
    said = pathlib.Path(__file__).parent / f"{number}.worker"
    said.write_text(os.environ["PYTEST_XDIST_WORKER"])
"""
CONFTEST = """
import pytest

@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        item.add_marker(pytest.mark.xdist_group("one"))
"""


@pytest.mark.long
def test_the_tests_of_a_group_run_in_one_process(tmp_path: Path) -> None:
    """They share engines and servers, which would all be started once more."""
    (tmp_path / "test_six.py").write_text(TESTS)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadgroup"]
    subprocess.run([*command, "--rootdir", str(tmp_path), str(tmp_path)], check=True, timeout=200)
    workers = [path.read_text() for path in tmp_path.glob("*.worker")]
    assert len(workers) == 6
    assert len(set(workers)) == 1
