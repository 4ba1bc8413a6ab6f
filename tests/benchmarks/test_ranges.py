"""The benchmark of large objects runs to its end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import ranges
from tests import servers


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    servers.set_credentials(monkeypatch)


def test_the_quick_benchmark_ends(tmp_path: Path) -> None:
    ranges.main(["--quick", "--connection-mb-s", "0", "--json", str(tmp_path / "result")])
    objects = json.loads((tmp_path / "result").read_text())["objects"]
    assert {name: told["requests"] for name, told in objects.items()} == {"8 MiB": 2, "32 MiB": 8}
    for told in objects.values():
        assert {name: set(told[name]) for name in ranges.ROWS} == {
            name: {"ms", "of_ideal", "of_plain_ranges"} for name in ranges.ROWS
        }
