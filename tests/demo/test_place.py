"""A bucket of the user's own: what is said of it when it cannot be used, and what is left in it."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from demo.place import place_to_use
from lab.s3 import S3Server, moto_process


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    with moto_process() as server:
        assert server.url is not None
        more = {"AWS_ENDPOINT_URL": server.url, "AWS_MAX_ATTEMPTS": "1", "S3KV_BUCKET": "mine"}
        for name, value in (server.env | more).items():
            monkeypatch.setenv(name, value)
        yield server


def refused() -> str:
    with pytest.raises(SystemExit) as end, place_to_use():
        raise AssertionError
    return str(end.value.code)


def test_a_bucket_that_does_not_exist(server: S3Server) -> None:
    told = refused()
    assert told.startswith("S3KV_BUCKET is 'mine': ")
    assert "NoSuchBucket" in told
    assert told.endswith(". `s3kv doctor --bucket mine` says what to do")


def test_an_endpoint_where_nobody_listens(
    server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as bound:  # and does not listen
        bound.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        assert url in refused()


def test_an_endpoint_that_is_no_url(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "localhost:9000")
    assert "localhost:9000" in refused()


def test_an_empty_name_is_none(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("S3KV_BUCKET", "")
    with place_to_use() as place:
        assert place.bucket == "demo"


def test_what_was_written_is_removed_and_nothing_else(server: S3Server) -> None:
    server.client().create_bucket(Bucket="mine")
    server.client().put_object(Bucket="mine", Key="other")
    with place_to_use() as place:
        server.client().put_object(Bucket="mine", Key=f"{place.prefix}/one")
    assert list(server.everything("mine")) == ["other"]


def test_an_error_is_not_hidden_by_that_of_cleaning_up(
    server: S3Server, capsys: pytest.CaptureFixture[str]
) -> None:
    server.client().create_bucket(Bucket="mine")
    with pytest.raises(RuntimeError, match="first"), place_to_use() as place:  # noqa: PT012
        server.client().delete_bucket(Bucket="mine")
        raise RuntimeError("first")
    assert f"s3://mine/{place.prefix}/ is left behind" in capsys.readouterr().err
