"""The bill, against sums done by hand."""

from __future__ import annotations

import pytest

from s3kv.cli import billing
from s3kv.cli.billing import GIB, BilledTraffic
from s3kv.errors import ConfigError
from s3kv.prices import Prices

TRAFFIC = BilledTraffic(
    seconds=3600.0,
    puts=1_000,
    gets=10_000,
    bytes_new=2 * GIB,
    bytes_up=3 * GIB,
    bytes_down=50 * GIB,
    tokens_bucket=7_200_000,
    tokens_host=3_600_000,
)
HOURS = 730


def test_samples_are_added_up_by_verb_and_status() -> None:
    text = (
        "# HELP requests Requests.\n"
        'requests{engine="0",status="2xx",verb="GET"} 1.0\n'
        'requests{engine="1",status="2xx",verb="GET",model_name="a \\"b\\" {c}"} 2.5\n'
        'requests{status="4xx",verb="GET"} 4\n'
        'bytes{engine="0"} 1e3\n'
        "bytes 1\n"
        "not a sample\n"
    )
    assert billing.metric_sums(text) == {
        "requests|GET|2xx": 3.5,
        "requests|GET|4xx": 4.0,
        "bytes": 1001.0,
    }


def test_counters_become_traffic() -> None:
    text = (
        'vllm:s3kv_io_requests_total{verb="PUT",status="2xx"} 3\n'
        'vllm:s3kv_io_requests_total{verb="LIST",status="2xx"} 1\n'
        'vllm:s3kv_io_requests_total{verb="PUT",status="5xx"} 9\n'
        'vllm:s3kv_ec_io_requests_total{verb="HEAD",status="4xx"} 2\n'
        "vllm:s3kv_upload_ok_total 1\n"
        "vllm:s3kv_upload_exists_total 3\n"
        "vllm:s3kv_upload_bytes_total 400\n"
    )
    traffic = billing.traffic_of_metrics(text, 60.0)
    assert (traffic.puts, traffic.gets, traffic.bytes_up, traffic.bytes_new) == (4, 2, 400, 100)
    assert billing.traffic_of_metrics("vllm:s3kv_x 1\n", 60.0).bytes_new == 0


def test_metrics_of_another_server_are_refused() -> None:
    with pytest.raises(ConfigError, match="no metric named vllm:s3kv_"):
        billing.traffic_of_metrics("vllm:num_requests_running 1\n", 60.0)


def test_a_month_is_like_the_period() -> None:
    prices = Prices(put=1.0, get=0.1, storage=0.02, upload=0.5, retrieval=0.25, transfer=0.125)
    parts = {part.name: part for part in billing.bill(TRAFFIC, 10 * GIB, prices)}
    assert {name: part.dollars for name, part in parts.items()} == pytest.approx(
        {
            "PUT": 1.0 * HOURS,
            "GET": 10 * 0.1 * HOURS,
            "storage": 0.2,
            "upload": 3 * 0.5 * HOURS,
            "retrieval": 50 * 0.25 * HOURS,
            "transfer": 50 * 0.125 * HOURS,
        }
    )


def test_what_the_bucket_comes_to_hold() -> None:
    assert billing.steady_bytes(TRAFFIC, 2.0) == pytest.approx(2 * GIB * 48)


def test_what_is_saved() -> None:
    saved = billing.savings(TRAFFIC, prefill_tokens_per_s=3_000, dollars_per_hour=4.0)
    assert (saved.tokens_bucket, saved.tokens_host) == pytest.approx((7.2e6 * HOURS, 3.6e6 * HOURS))
    assert saved.hours == pytest.approx(HOURS)  # 10.8 M tokens take an hour
    assert saved.dollars == pytest.approx(4.0 * HOURS)
