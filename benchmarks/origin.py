"""Where a result comes from: its commit, and how fast the machine is."""

from __future__ import annotations

import hashlib
import subprocess
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_ADDITIONS = 1_000_000


def commit() -> str:
    """The commit whose code gives a result; "+" behind it: with changes."""
    said = subprocess.run(
        ["git", "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return said.stdout.strip()


def computing() -> dict[str, float]:
    """How fast one core of the machine computes: the best of a few rounds. numbers_per_s: additions
    of Python; sha256_bytes_per_s: of a buffer that fits its caches."""
    buffer = bytes(2**18)
    adding_s, hashing_s = [], []
    for _ in range(5):
        start_s = time.perf_counter()
        sum(number for number in range(_ADDITIONS))
        middle_s = time.perf_counter()
        for _ in range(32):
            hashlib.sha256(buffer)
        adding_s.append(middle_s - start_s)
        hashing_s.append(time.perf_counter() - middle_s)
    return {
        "numbers_per_s": round(_ADDITIONS / min(adding_s), -5),
        "sha256_bytes_per_s": round(32 * len(buffer) / min(hashing_s), -6),
    }
