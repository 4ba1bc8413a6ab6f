"""The URL of a proxy; requests through one are in `s3/test_s3_store.py`."""

from __future__ import annotations

import pytest

from s3kv.errors import ConfigError
from s3kv.stores.http.proxy import Proxy


@pytest.mark.parametrize(
    ("url", "host", "port", "user"),
    [
        ("http://proxy.example:3128", "proxy.example", 3128, None),
        ("http://proxy.example", "proxy.example", 80, None),
        ("http://[::1]:8080", "::1", 8080, None),
        ("http://me:a%40b@proxy.example:1", "proxy.example", 1, "bWU6YUBi"),
        ("http://me@proxy.example:1", "proxy.example", 1, "bWU6"),
    ],
)
def test_what_a_url_says(url: str, host: str, port: int, user: str | None) -> None:
    found = Proxy.of(url)
    assert (found.host, found.port) == (host, port)
    assert found.headers == ({} if user is None else {"Proxy-Authorization": f"Basic {user}"})
    assert "a%40b" not in found.name


@pytest.mark.parametrize("url", ["https://me:Pa55@proxy:1", "socks5://proxy:1", "http://:80"])
def test_a_proxy_that_cannot_be_used(url: str) -> None:
    with pytest.raises(ConfigError, match=r"the environment names the proxy .*allowed") as caught:
        Proxy.of(url)
    assert "Pa55" not in str(caught.value)
