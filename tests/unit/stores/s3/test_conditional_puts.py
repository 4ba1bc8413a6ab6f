"""`If-None-Match` on servers that know it, ignore it, or refuse it, and answers that get lost."""

from __future__ import annotations

import pytest

from s3kv.errors import StoreDenied, StoreError, StoreUnavailable
from s3kv.place import Place
from s3kv.stores.store import ObjectStore
from tests import servers
from tests.unit.stores.s3.conftest import OpenStore, facing

BODY = memoryview(b"a chunk")


class Shelf:
    """Keeps what is put. conditional: its answer to `If-None-Match`: a status and a code, None for
    the right one, "" if it ignores the header. plain: its answer to other PUTs, None for the right
    one. lose: answers to lose after having obeyed."""

    def __init__(self, conditional: tuple[int, str] | str | None) -> None:
        self.conditional = conditional
        self.plain: tuple[int, str] | None = None
        self.lose = 0
        self.kept: dict[str, bytes] = {}
        self.puts: list[bool] = []

    def answer(self, head: str, body: bytes) -> bytes | None:
        status, code = self._put(head.split(" ")[1], "if-none-match" in head.lower(), body)
        if self.lose:
            self.lose -= 1
            return None
        return servers.refusal(status, code)

    def _put(self, key: str, conditional: bool, body: bytes) -> tuple[int, str]:
        self.puts.append(conditional)
        told = self.conditional if conditional else self.plain
        if isinstance(told, tuple):
            return told
        if conditional and told is None and key in self.kept:
            return 412, "PreconditionFailed"
        self.kept[key] = body
        return 200, ""


async def put(store: ObjectStore, key: str = "k") -> bool:
    return await store.put(key, Place.of(BODY), if_absent=True)


@pytest.mark.parametrize(
    "refusal",
    [(501, "NotImplemented"), (400, "InvalidArgument"), (400, "InvalidRequest"), (501, "")],
)
async def test_a_server_that_refuses_it_gets_plain_ones(
    s3_store: OpenStore, refusal: tuple[int, str], caplog: pytest.LogCaptureFixture
) -> None:
    async with facing(Shelf(refusal), s3_store) as (server, store):
        assert [await put(store) for _ in range(3)] == [True, True, True]
        assert server.puts == [True, False, False, False], "found out once"
        assert server.kept == {"/bkt/k": bytes(BODY)}
    (said,) = [record.getMessage() for record in caplog.records if "Plain PUTs" in record.message]
    assert "s3:PutObject on arn:aws:s3:::bkt/k" in said


async def test_a_server_that_ignores_it_writes_again(s3_store: OpenStore) -> None:
    async with facing(Shelf(""), s3_store) as (server, store):
        assert [await put(store), await put(store)] == [True, True]
        assert server.puts == [True, True]


async def test_a_server_that_knows_it_is_believed_from_then_on(s3_store: OpenStore) -> None:
    async with facing(Shelf(None), s3_store) as (server, store):
        assert [await put(store), await put(store)] == [True, False]
        server.conditional = (400, "InvalidArgument")
        with pytest.raises(StoreError):
            await put(store, "other")
        assert server.puts == [True, True, True]


async def test_a_refusal_for_another_reason_proves_nothing(s3_store: OpenStore) -> None:
    async with facing(Shelf((400, "InvalidArgument")), s3_store) as (server, store):
        server.plain = (400, "InvalidArgument")
        with pytest.raises(StoreError, match="InvalidArgument"):
            await put(store)
        server.conditional = None
        assert await put(store)
        assert server.puts == [True, False, True]


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ((400, "RequestTimeout"), StoreUnavailable),
        ((409, "ConditionalRequestConflict"), StoreUnavailable),
        ((403, "AccessDenied"), StoreDenied),
        ((503, "SlowDown"), StoreUnavailable),
    ],
)
async def test_no_refusal_of_conditions(
    s3_store: OpenStore, answer: tuple[int, str], error: type[StoreError]
) -> None:
    async with facing(Shelf(answer), s3_store) as (server, store):
        with pytest.raises(error):
            await put(store)
        assert server.puts == [True]


async def test_a_put_whose_answer_is_lost_finds_its_own_copy(s3_store: OpenStore) -> None:
    async with facing(Shelf(None), s3_store) as (server, store):
        server.lose = 1
        with pytest.raises(StoreUnavailable):
            await put(store)
        assert await put(store) is False
        assert server.kept == {"/bkt/k": bytes(BODY)}
