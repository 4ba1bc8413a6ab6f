"""A benchmark always ends, and says where it was if it did not end by itself."""

from __future__ import annotations

import subprocess
import sys

import pytest

HANGS = """
import time
from benchmarks.rig import begin

def hang():
    time.sleep(1000)

begin("a server", 0.1)
hang()
"""


@pytest.mark.timeout(300)
def test_a_benchmark_that_hangs_is_ended() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", HANGS], capture_output=True, text=True, check=False, timeout=200
    )
    assert ended.returncode == 1
    assert "server: a server" in ended.stderr
    assert "in hang" in ended.stderr
