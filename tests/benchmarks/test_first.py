"""The benchmark of first hits runs to its end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import first
from tests import servers


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    servers.set_credentials(monkeypatch)


def test_the_quick_benchmark_ends(tmp_path: Path) -> None:
    few = ["--chunks", "4", "--idle-s", "1", "--first-byte-ms", "0", "--connection-mb-s", "0"]
    first.main(["--quick", "--tls", *few, "--json", str(tmp_path / "result")])
    clients = json.loads((tmp_path / "result").read_text())["clients"]
    assert {name: set(rows) for name, rows in clients.items()} == {
        name: set(first.ROWS) for name in first.CLIENTS
    }
    assert all(
        figure > 0 for rows in clients.values() for row in rows.values() for figure in row.values()
    )
