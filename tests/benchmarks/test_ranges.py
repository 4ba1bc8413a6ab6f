"""The benchmark of large objects runs to its end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import ranges
from benchmarks.shaped import Shape
from tests import servers

FAST = Shape(connection_mb_s=0, host_mb_s=0, first_byte_ms=0, sigma=0)


pytestmark = pytest.mark.timeout(300)


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    servers.set_credentials(monkeypatch)


def test_the_quick_benchmark_ends(tmp_path: Path) -> None:
    ranges.main(["--quick", "--connection-mb-s", "0", "--json", str(tmp_path / "result")])
    result = json.loads((tmp_path / "result").read_text())
    assert result["objects"]["32 MiB"]["requests"] == 8
    assert {name: set(result["objects"]["32 MiB"][name]) for name in ranges.ROWS} == {
        name: {"ms", "of_ideal", "of_plain_ranges"} for name in ranges.ROWS
    }
