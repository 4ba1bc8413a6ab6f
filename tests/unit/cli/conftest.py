"""A bucket on moto, and the command line pointed at it."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from click.testing import CliRunner, Result

from lab.memory_store import MemoryStore
from s3kv.cli.app import cli
from s3kv.objects.keys import Namespace
from s3kv.place import Place
from s3kv.types import ChunkKey
from tests import servers

Run = Callable[..., Result]
SHARD = "h0-7of8-l0-31of32"


def block_hash(number: int) -> bytes:
    return hashlib.sha256(bytes([number])).digest()


def chunk(place: Namespace, number: int) -> str:
    """The key of a chunk."""
    return place.chunk(ChunkKey(0, block_hash(number)), SHARD)


def put(boto: Any, key: str, data: bytes) -> None:
    boto.put_object(Bucket=servers.BUCKET, Key=key, Body=data)


def left(boto: Any, bucket: str = servers.BUCKET) -> set[str]:
    """The keys that are in the bucket."""
    return {one["Key"] for one in boto.list_objects_v2(Bucket=bucket).get("Contents", ())}


def refused(result: Result, *said: str, code: int = 2) -> None:
    """It failed with this code: said so on stderr, and nothing on stdout."""
    assert (result.exit_code, result.stdout) == (code, "")
    assert all(words in result.stderr for words in said), result.stderr


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


class Persistent(MemoryStore):
    """Carries out a PUT that it has received, whatever becomes of the connection, as a server does.
    on_call: called with the verb and the key of each call."""

    def __init__(self, on_call: Callable[[str, str], object]) -> None:
        super().__init__(clock=lambda: 0.0)
        self._on_call = on_call

    async def begin(self, verb: str, key: str) -> None:
        if verb != "put":
            self._on_call(verb, key)
        await super().begin(verb, key)

    async def put(self, key: str, place: Place, *, if_absent: bool) -> bool:
        async def carry_out() -> bool:
            self._on_call("put", key)
            await asyncio.sleep(0.02)
            return await MemoryStore.put(self, key, place, if_absent=if_absent)

        return await asyncio.shield(carry_out())
