"""`s3kv cost`, against sums done by hand."""

from __future__ import annotations

import json
import os
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from lab.service import free_ports
from s3kv.cli.app import cli
from tests.servers import in_a_thread
from tests.unit.cli.conftest import refused

METRICS = """\
# HELP vllm:s3kv_io_sent_bytes_total Bytes of objects written to the store.
# TYPE vllm:s3kv_io_sent_bytes_total counter
vllm:s3kv_io_sent_bytes_total{engine="0",model_name="a {b} \\"c\\""} 2.147483648e+11
vllm:s3kv_io_sent_bytes_total{engine="1",model_name="m"} 1.073741824e+11
vllm:s3kv_io_requests_total{engine="0",model_name="m",status="2xx",verb="PUT"} 200000.0
vllm:s3kv_io_requests_total{engine="1",model_name="m",status="2xx",verb="PUT"} 99990.0
vllm:s3kv_io_requests_total{engine="0",model_name="m",status="4xx",verb="PUT"} 100000.0
vllm:s3kv_io_requests_total{engine="0",model_name="m",status="5xx",verb="PUT"} 77.0
vllm:s3kv_io_requests_total{engine="0",model_name="m",status="2xx",verb="LIST"} 10.0
vllm:s3kv_io_requests_total{engine="0",model_name="m",status="2xx",verb="GET"} 930000.0
vllm:s3kv_io_requests_total{engine="0",model_name="m",status="4xx",verb="GET"} 50000.0
vllm:s3kv_io_requests_total{engine="0",model_name="m",status="none",verb="GET"} 55.0
vllm:s3kv_io_requests_total{engine="0",model_name="m",status="2xx",verb="HEAD"} 10000.0
vllm:s3kv_io_requests_total{engine="0",model_name="m",status="2xx",verb="DELETE"} 5.0
vllm:s3kv_ec_io_requests_total{engine="0",model_name="m",status="2xx",verb="GET"} 10000.0
vllm:s3kv_io_received_bytes_total{engine="0",model_name="m"} 8.589934592e+11
vllm:s3kv_ec_io_received_bytes_total{engine="0",model_name="m"} 2.147483648e+11
vllm:s3kv_hit_tokens_bucket_total{engine="0",model_name="m"} 2.3e+08
vllm:s3kv_hit_tokens_host_total{engine="0",model_name="m"} 1.3e+08
vllm:num_requests_running{engine="0",model_name="m"} 3.0
"""
"""400,000 requests at the price of a PUT (of which 300 GiB are new),
1,000,000 at that of a GET, of 1,000 GiB; 360 M tokens not computed."""

MONTH = "730h"
ENGINE = ("--gpu-dollars-per-hour", "3.6", "--prefill-tokens-per-s", "1000")
"""A dollar for a million tokens."""


def run(*arguments: str) -> Result:
    words = ["cost", "--stored", "1GiB", *arguments]
    return CliRunner().invoke(cli, words, catch_exceptions=False)


def document(*arguments: str) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))


@pytest.fixture
def metrics(tmp_path: Path) -> str:
    file = tmp_path / "metrics.txt"
    file.write_text(METRICS)
    return str(file)


PARTS = ("PUT", "GET", "storage", "upload", "retrieval", "transfer")
OWN_PRICES = [
    word for n, name in enumerate(PARTS, 1) for word in (f"--price-{name.lower()}", str(n))
]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # 400 × $0.005, 1,000 × $0.0004, 100 GiB × $0.023
        ([], (2.0, 0.4, 2.3, 0.0, 0.0, 0.0)),
        (["--over", "365h"], (4.0, 0.8, 2.3, 0.0, 0.0, 0.0)),  # half the time, twice the requests
        (OWN_PRICES, (400.0, 2_000.0, 300.0, 1_200.0, 5_000.0, 6_000.0)),
        # 400 × $0.00113, 1,000 × $0.00003, 100 × $0.11, 300 × $0.0032, 1,000 × $0.0006
        (["--prices", "us-east-1/express"], (0.452, 0.03, 11.0, 0.96, 0.6, 0.0)),
    ],
    ids=["a month", "half of one", "own prices", "another table"],
)
def test_a_month_by_hand(metrics: str, options: list[str], expected: tuple[float, ...]) -> None:
    found = document("--metrics", metrics, "--over", MONTH, "--stored", "100GiB", *options)
    dollars = {part["name"]: round(part["dollars"], 6) for part in found["parts"]}
    assert dollars == dict(zip(PARTS, expected, strict=True))
    assert found["dollars_per_month"] == pytest.approx(sum(expected))
    assert found["saved"] is None


def test_what_is_saved(metrics: str) -> None:
    options = ("--gpu-dollars-per-hour", "3", "--prefill-tokens-per-s", "10000")
    found = document("--metrics", metrics, "--over", MONTH, "--stored", "1TiB", *options)
    # 360 M tokens at 10,000 a second are ten hours.
    assert found["saved"]["hours"] == pytest.approx(10)
    assert found["saved"]["dollars"] == pytest.approx(30)
    text = run("--metrics", metrics, "--over", MONTH, "--stored", "1TiB", *options).stdout
    assert "230.0 M from the bucket, 130.0 M from host memory" in text
    assert "400,000" in text


def test_what_a_tier_saves_is_not_known(tmp_path: Path) -> None:
    (file := tmp_path / "metrics.txt").write_text(METRICS.replace("hit_tokens", "other"))
    assert document("--metrics", str(file), "--over", MONTH)["counted"]["tokens_bucket"] is None
    refused(run("--metrics", str(file), "--over", MONTH, *ENGINE), "does not count the tokens")


def test_several_servers_are_summed(metrics: str) -> None:
    found = document("--metrics", metrics, "--metrics", metrics, "--over", MONTH)
    assert (found["counted"]["puts"], found["counted"]["gets"]) == (800_000, 2_000_000)


def test_a_running_server(metrics: str) -> None:
    folder, name = os.path.split(metrics)
    handler = partial(SimpleHTTPRequestHandler, directory=folder)
    with in_a_thread(ThreadingHTTPServer(("127.0.0.1", 0), handler)) as url:
        counted = document("--metrics", f"{url}/{name}", "--over", MONTH)["counted"]
    assert counted["puts"] == 400_000


def test_nobody_there() -> None:
    for url in (f"http://127.0.0.1:{free_ports(1)[0]}/metrics", "http://[::1:8000/metrics"):
        result = run("--metrics", url, "--over", "1h")
        refused(result, f"--metrics {url!r} does not", "has the server started?", code=3)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--over", "1h"], "Missing option '--metrics'"),
        (["--metrics", "/dev/null"], "Missing option '--over'"),
        (["--over", "soon", "--metrics", "-"], "not a time such as"),
        (["--over", "1h", "--metrics", "/nowhere"], "cannot be read"),
        (["--over", "1h", "--metrics", "/dev/null"], "no metric named vllm:s3kv_"),
        (["--over", "1h", "--metrics", "/dev/null", "--stored", "lots"], "not a size such as"),
        (
            ["--over", "1h", "--metrics", "/dev/null", "--gpu-dollars-per-hour", "1"],
            "--prefill-tokens-per-s go together",
        ),
    ],
)
def test_wrong_use(options: list[str], said: str) -> None:
    refused(run(*options), said)


def test_the_largest_bucket_that_pays(metrics: str) -> None:
    given = ("--metrics", metrics, "--over", MONTH, "--stored", "100GiB", *ENGINE)
    # 230 M tokens from the bucket are worth $230; requests cost $2.40.
    assert document(*given)["paid_bytes"] == pytest.approx((230 - 2.4) / 0.023 * 2**30)
    assert "bucket_bytes of at most 9.7 TiB" in run(*given).output
    assert "not even pay for its requests" in run(*given, "--price-put", "1").output
    assert document(*given, "--price-storage", "0")["paid_bytes"] is None
