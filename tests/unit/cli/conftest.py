"""A bucket on moto, and the command line pointed at it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from click.testing import CliRunner, Result

from s3kv.cli.app import cli
from tests import servers

Run = Callable[..., Result]


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    servers.set_credentials(monkeypatch)
    monkeypatch.setenv("COLUMNS", "200")
    with servers.moto_server() as url:
        yield url


@pytest.fixture
def boto(url: str) -> Any:
    return servers.boto_client(url, servers.KEYS)


@pytest.fixture
def run(url: str) -> Run:
    """Run a command on the bucket; `at` is another server, `bucket` another bucket."""

    def run(*arguments: str, at: str = url, bucket: str = servers.BUCKET) -> Result:
        command = [*arguments, "--bucket", bucket, "--endpoint-url", at]
        return CliRunner().invoke(cli, command, catch_exceptions=False)

    return run
