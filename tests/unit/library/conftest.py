"""Settings for the tests of the library: a bucket of their own, and a proxy before it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from lab.constants import changed
from lab.proxy import Proxy, proxy
from s3kv.config import Config
from tests.unit.library.stores import fresh_bucket


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Iterator[Config]:
    with fresh_bucket(monkeypatch) as config:
        yield config


@pytest.fixture
def behind(config: Config) -> Iterator[tuple[Proxy, Config]]:
    """A proxy before the server, and the settings to go through it, without second tries."""
    with proxy(str(config.endpoint_url)) as between, changed(max_attempts=1):
        yield between, dataclasses.replace(config, endpoint_url=between.url)


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three attempts at an upload, with short pauses between them."""
    monkeypatch.setattr("s3kv.planning.uploads.UPLOAD_RETRY_S", (0.01, 0.02))
