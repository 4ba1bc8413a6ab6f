"""What a request says about its own caching."""

from __future__ import annotations

from typing import Any

import pytest

from s3kv.connectors.request_params import read_limits
from s3kv.planning.requests import NO_LIMITS, RequestLimits

READABLE: list[tuple[Any, RequestLimits]] = [
    (None, NO_LIMITS),
    ({}, NO_LIMITS),
    ({"s3kv": {}}, NO_LIMITS),
    ({"s3kv": {"save": True, "load": True}}, NO_LIMITS),
    ({"s3kv": {"save": False}}, RequestLimits(save_tokens=0)),
    ({"s3kv": {"load": False}}, RequestLimits(load_tokens=0)),
    ({"s3kv": {"max_save_tokens": 512}}, RequestLimits(save_tokens=512)),
    ({"s3kv": {"max_save_tokens": None}}, NO_LIMITS),
    ({"s3kv": {"save": False, "max_save_tokens": 512}}, RequestLimits(save_tokens=0)),
    ({"max_offload_tokens": 256, "max_load_tokens": 128}, RequestLimits(256, 128)),
    ({"max_offload_tokens": 256, "s3kv": {"max_save_tokens": 512}}, RequestLimits(256)),
    ({"max_load_tokens": 128, "s3kv": {"load": False}}, RequestLimits(None, 0)),
    ({"do_remote_prefill": True, "remote_host": "10.0.0.1"}, NO_LIMITS),
]

UNREADABLE: list[tuple[Any, str]] = [
    ({"s3kv": {"saev": False}}, "saev"),
    ({"s3kv": {"retain_s": 60}}, "retain_s"),
    ({"s3kv": {"save": "no"}}, "$.s3kv.save"),
    ({"s3kv": {"save": 0}}, "$.s3kv.save"),
    ({"s3kv": {"max_save_tokens": -1}}, "$.s3kv.max_save_tokens"),
    ({"s3kv": {"max_save_tokens": 1.5}}, "$.s3kv.max_save_tokens"),
    ({"s3kv": {"max_save_tokens": True}}, "$.s3kv.max_save_tokens"),
    ({"s3kv": None}, "$.s3kv"),
    ({"s3kv": [False]}, "$.s3kv"),
    ({"max_offload_tokens": "many"}, "$.max_offload_tokens"),
    ({"max_load_tokens": -1}, "$.max_load_tokens"),
    ("private", "object"),
    ([1], "object"),
    ({1: 2, "s3kv": {"save": "no"}}, ""),
]


@pytest.mark.parametrize(("params", "limits"), READABLE)
def test_what_is_said_is_heard(params: Any, limits: RequestLimits) -> None:
    assert read_limits(params) == limits


@pytest.mark.parametrize(("params", "said"), UNREADABLE)
def test_what_cannot_be_read_makes_the_request_private(
    params: Any, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert read_limits(params) == RequestLimits(save_tokens=0)
    assert caplog.messages == []
    assert read_limits(params, "r") == RequestLimits(save_tokens=0)
    assert said in caplog.messages[0]


def test_a_client_writes_no_lines_of_its_own_into_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    read_limits({"s3kv": {"save\nERROR: all is lost" + "!" * 1_000: False}}, "r")
    (record,) = caplog.records
    assert "\n" not in record.getMessage()
    assert len(record.getMessage()) < 400
    assert record.getMessage().startswith("s3kv saves nothing of request r, because")
