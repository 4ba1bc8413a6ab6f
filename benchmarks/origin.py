"""Where a result comes from: its commit, the code that it measures, and how fast the machine is.

A result carries digests of the code that it measures. `tests/repository/test_docs.py` fails when
the documentation shows a result of other code.
"""

from __future__ import annotations

import hashlib
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_SERVING = tuple(
    f"s3kv/{folder}"
    for folder in ("connectors", "device", "host", "io", "objects", "planning", "stores", "worker")
)
MEASURED: dict[str, tuple[str, ...]] = {
    "compressed": _SERVING,
    "compression": ("s3kv/objects/compression.py", "s3kv/objects/envelope.py"),
    "encoder": _SERVING,
    "engine": _SERVING,
    "peers": _SERVING,
    "planner": ("s3kv/host", "s3kv/planning"),
    "short": _SERVING,
    "trace": (
        "benchmarks/simulation",
        "s3kv/host",
        "s3kv/io/server/jobs.py",
        "s3kv/planning",
        "s3kv/upkeep/cleaner.py",
        "s3kv/upkeep/refreshing.py",
        "s3kv/upkeep/ages.py",
        "s3kv/upkeep/sweep.py",
    ),
}
"""Files and folders whose code a benchmark measures, by its name. A change elsewhere is taken not
to matter."""
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


def code(benchmark: str) -> dict[str, str]:
    """Digests of what the benchmark measures, by path; nothing for one without an entry."""
    return {path: _digest(ROOT / path) for path in MEASURED.get(benchmark, ())}


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


def changed(result: Mapping[str, Any]) -> list[str]:
    """Paths whose code is not that of the result. Raises `KeyError` for a result without digests,
    or of a benchmark without an entry."""
    measured = MEASURED[result["benchmark"]]
    return sorted(path for path in measured if _digest(ROOT / path) != result["code"].get(path))


def of(benchmark: str) -> dict[str, Any]:
    """All of this for a result of today."""
    return {"commit": commit(), "computing": computing(), "code": code(benchmark)}


def _digest(path: Path) -> str:
    """Of a file, or of all Python files in a folder, with their names."""
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    digest = hashlib.sha256()
    for file in files:
        digest.update(
            b"%s %d\n" % (file.relative_to(ROOT).as_posix().encode(), file.stat().st_size)
        )
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]
