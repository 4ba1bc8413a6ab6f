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
