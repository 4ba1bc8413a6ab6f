"""Memory is read and written where it is allowed, wherever an allocator has it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu import sanitized

ROOT = Path(__file__).parents[2]
SANITIZER = shutil.which("compute-sanitizer") or shutil.which(
    "compute-sanitizer", path="/usr/local/cuda/bin"
)
FOUND = 99
"""What the sanitizer ends with when it has found something."""


def run(check: list[str], options: list[str], env: dict[str, str], timeout_s: float) -> None:
    """The program ends well, under a check."""
    done = subprocess.run(
        [*check, sys.executable, "-m", "tests.gpu.sanitized", *options],
        cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True, timeout=timeout_s,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout[-6000:], done.stderr[-6000:])


@pytest.mark.parametrize("options", [["cpu"], ["simulated"], ["simulated", "--large"]])
def test_the_program_finds_right_bytes(options: list[str]) -> None:
    assert sanitized.main(["--kind", *options]) == 0


def test_the_program_notices_wrong_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitized, "peek", lambda layout, blocks: b"")
    assert sanitized.main(["--kind", "cpu"]) == 1


@pytest.mark.gpu
@pytest.mark.timeout(400)
@pytest.mark.skipif(SANITIZER is None, reason="compute-sanitizer is not installed")
def test_memcheck_finds_nothing() -> None:
    """Without torch's caching of memory, in which every address is some tensor's."""
    # Not the errors of calls: libraries ask the driver for functions that it may not have.
    check = [SANITIZER, "--tool", "memcheck", "--report-api-errors", "no"]
    check += ["--error-exitcode", str(FOUND)]
    run(check, [], {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, 380)


@pytest.mark.gpu
@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "settings", ["expandable_segments:True", "backend:cudaMallocAsync", "max_split_size_mb:32"]
)
def test_pages_may_be_in_memory_of_any_allocator(settings: str) -> None:
    """Expandable segments are mapped piece by piece, and a cache has many; pages may lie on two."""
    variables = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    run([], ["--mib", "96"], dict.fromkeys(variables, settings), 110)
