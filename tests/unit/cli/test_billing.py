"""The traffic that metrics count; `test_cost` has the bill."""

from __future__ import annotations

from s3kv.cli import billing


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
    sums = {"requests|GET|2xx": 3.5, "requests|GET|4xx": 4.0, "bytes": 1001.0}
    assert billing.metric_sums(text) == sums


def test_counters_become_traffic() -> None:
    text = (
        'vllm:s3kv_io_requests_total{verb="PUT",status="2xx"} 3\n'
        'vllm:s3kv_io_requests_total{verb="LIST",status="2xx"} 1\n'
        'vllm:s3kv_io_requests_total{verb="PUT",status="5xx"} 9\n'
        'vllm:s3kv_ec_io_requests_total{verb="HEAD",status="4xx"} 2\n'
        "vllm:s3kv_io_sent_bytes_total 400\n"
        "vllm:s3kv_ec_io_received_bytes_total 100\n"
    )
    traffic = billing.traffic_of_metrics(text, 60.0)
    assert (traffic.puts, traffic.gets, traffic.bytes_up, traffic.bytes_down) == (4, 2, 400, 100)
