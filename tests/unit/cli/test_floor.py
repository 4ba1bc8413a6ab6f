"""Plain sockets: they read what is there, and say when they cannot."""

from __future__ import annotations

from typing import Any

import pytest

from lab.faults import Fault, s3_error
from lab.proxy import proxy
from s3kv.cli.floor import floor_s
from s3kv.config import Config
from s3kv.errors import StoreUnavailable
from tests import servers

KEYS = ("floor/0", "floor/1")
NBYTES = 3000


@pytest.fixture
def config(url: str, boto: Any) -> Config:
    for key in KEYS:
        boto.put_object(Bucket=servers.BUCKET, Key=key, Body=b"x" * NBYTES)
    return Config(bucket=servers.BUCKET, endpoint_url=url)


async def test_all_requests_are_made(config: Config, url: str) -> None:
    with proxy(url) as between:
        through = Config(bucket=servers.BUCKET, endpoint_url=between.url)
        seconds = await floor_s(through, KEYS, 7, NBYTES)
        assert between.statistics().requests == {"GET": 7}
    assert seconds is not None
    assert seconds > 0


async def test_an_answer_of_another_length_is_an_error(config: Config) -> None:
    with pytest.raises(StoreUnavailable, match=f"status 200, a body of {NBYTES} bytes"):
        await floor_s(config, KEYS, 4, NBYTES + 1)


@pytest.mark.parametrize("fault", [s3_error(503, "SlowDown"), Fault(kind="refuse")])
async def test_a_socket_that_fails(config: Config, url: str, fault: Fault) -> None:
    with proxy(url) as between:
        between.fault(fault)
        through = Config(bucket=servers.BUCKET, endpoint_url=between.url)
        with pytest.raises(StoreUnavailable, match="a plain socket fails"):
            await floor_s(through, KEYS, 4, NBYTES)


async def test_no_floor_behind_a_proxy(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as proxied_host:
        proxied_host.setenv("HTTP_PROXY", "http://127.0.0.1:1")
        for name in ("NO_PROXY", "no_proxy"):
            proxied_host.delenv(name, raising=False)
        assert await floor_s(config, KEYS, 1, NBYTES) is None
