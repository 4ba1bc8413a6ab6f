"""The benchmark of saving, on a real engine whose connector comes and goes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import saving
from scripts import results


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_quick_benchmark_ends(tmp_path: Path) -> None:
    saving.main(["--quick", "--json", str(tmp_path / "result")])
    result = json.loads((tmp_path / "result").read_text())
    assert set(result["ratio"]) == {"again", "empty", "own"}
    assert all(ms > 0 for ms in result["median_ms"].values())
    assert "| s3kv | " in results.saving(result)
