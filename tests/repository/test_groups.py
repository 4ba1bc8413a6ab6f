"""pytest-xdist keeps the tests of a group in one process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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
