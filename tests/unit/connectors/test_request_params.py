"""Parameters of a request's own caching."""

from __future__ import annotations

from typing import Any

import pytest

from s3kv.connectors import request_params
from s3kv.connectors.request_params import read_limits
from s3kv.planning.requests import NO_LIMITS, RequestLimits
from s3kv.types import Tally, once_a_minute

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
    ({"s3kv": {"\ud800": 1}}, "surrogates not allowed"),
    ({"s3kv": [False]}, "$.s3kv"),
    ({"max_offload_tokens": "many"}, "$.max_offload_tokens"),
    ({"max_load_tokens": -1}, "$.max_load_tokens"),
    ("private", "object"),
    ([1], "object"),
    ({1: 2, "s3kv": {"save": "no"}}, ""),
    ({"s3kv": {"save\nERROR: all is lost" + "!" * 1_000: False}}, ""),
]


@pytest.mark.parametrize(("params", "limits"), READABLE)
def test_limits_are_read(params: Any, limits: RequestLimits) -> None:
    assert read_limits(params) == limits


@pytest.mark.parametrize(("params", "reason"), UNREADABLE)
def test_unreadable_parameters_make_the_request_private(
    params: Any, reason: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All are counted, and one a minute is logged: clients could fill the log."""
    monkeypatch.setattr(request_params, "_may_log", once_a_minute(lambda: 0.0))
    counters = Tally()
    for limits in (
        read_limits(params),
        *(read_limits(params, r, counters) for r in ("r\n", *"stu")),
    ):
        assert limits == RequestLimits(save_tokens=0)
    assert counters == {"unreadable_params": 4}
    (message,) = caplog.messages
    assert message.startswith(r"s3kv saves nothing of request r\n, because")
    assert reason in message
    assert "\n" not in message, "a client writes no lines of its own into the log"
    assert len(message) < 400
