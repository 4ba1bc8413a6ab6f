"""A simulated run is billed as a server with its counters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import counters
from s3kv.cli.billing import GIB, traffic_of_metrics
from tests.project import ROOT

SIMULATED = {
    "runs": [
        {"policy": "no cache", "host_gib": 0, "requests": {}, "tokens": {}},
        {
            "policy": "lru",
            "host_gib": 8.0,
            "requests": {
                "get_hit": 600,
                "get_404": 300,
                "get_cancelled": 100,
                "put_new": 90,
                "put_exists": 10,
            },
            "tokens": {"gpu": 5, "host": 1_000_000, "bucket": 800_000, "computed": 9},
            "gib_down": 60.0,
            "gib_up": 10.0,
            "gib_stored": 9.0,
        },
        {"policy": "lru", "host_gib": 32.0, "requests": {}, "tokens": {}},
        {"policy": "s3fifo", "host_gib": 8.0, "requests": {}, "tokens": {}},
    ]
}


@pytest.fixture
def result(tmp_path: Path) -> Path:
    file = tmp_path / "trace.json"
    file.write_text(json.dumps(SIMULATED))
    return file


def test_the_traffic_is_that_of_the_run(result: Path, capsys: pytest.CaptureFixture[str]) -> None:
    counters.main([str(result), "--host-gib", "8"])
    traffic = traffic_of_metrics(capsys.readouterr().out, 3600.0)
    assert (traffic.puts, traffic.gets) == (100, 1000)
    assert (traffic.bytes_up, traffic.bytes_down) == (10 * GIB, 60 * GIB)
    assert traffic.bytes_new == pytest.approx(9 * GIB)
    assert (traffic.tokens_bucket, traffic.tokens_host) == (800_000, 1_000_000)


def test_a_run_that_is_not_named(result: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options in ([], ["--host-gib", "16"]):
        with pytest.raises(SystemExit, match="2"):
            counters.main([str(result), *options])
        assert "allowed is one of 8, 32" in capsys.readouterr().err


def test_the_results_in_the_repository_can_be_read() -> None:
    results = ROOT / "benchmarks" / "results" / "trace-session.json"
    run = counters.chosen(results, 32.0)
    assert traffic_of_metrics(counters.exposition(run), 3600.0).puts == 164_636
