"""Errors that reach the engine at start, and hooks that fail afterwards."""

from __future__ import annotations

import logging
from unittest.mock import Mock

import pytest

from s3kv.config import Config
from s3kv.connectors.guard import Guarded, guarded, wait_for_bucket
from s3kv.errors import IoProcessError, StoreError, StoreMissing
from s3kv.io.client import IoClient


class Side(Guarded):
    def __init__(self) -> None:
        self.breaks = 0

    @guarded(default=list)
    def hook(self, value: object) -> list[object]:
        if value is None:
            raise KeyError("a bug")
        return [value]

    @guarded(default=lambda: 7)
    def other(self) -> int:
        return 1

    def on_broken(self) -> None:
        self.breaks += 1


def test_one_failed_hook_ends_all_of_its_side(caplog: pytest.LogCaptureFixture) -> None:
    side, bystander = Side(), Side()
    assert side.hook(1) == [1]
    assert side.other() == 1
    assert side.hook(None) == []
    assert side.hook(1) == []
    assert side.other() == 7
    assert (side.broken, side.breaks) == ("hook", 1)
    assert [record.levelno for record in caplog.records] == [logging.ERROR], "said once"
    assert "KeyError: 'a bug'" in caplog.text
    assert bystander.hook(1) == [1]


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (StoreMissing("no such bucket"), "on_unavailable 'serve'"),
        (IoProcessError("it died"), "it died"),
    ],
)
def test_an_error_at_start_names_the_bucket(
    error: Exception, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    client = Mock(spec=IoClient)
    client.wait_ready.side_effect = error  # it cannot use the bucket, or has died
    with pytest.raises(type(error), match=f"bucket 'kv-cache' cannot be used: {error}") as raised:
        wait_for_bucket(client, Config(bucket="kv-cache"))
    assert says in str(raised.value)
    assert ("does not start" in str(raised.value)) == isinstance(error, StoreError)
    assert str(raised.value) in caplog.text
