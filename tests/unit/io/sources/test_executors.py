"""Threads run before there is work for them, or the process does not start."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest

from s3kv.errors import ConfigError
from s3kv.io.sources.executors import started


@contextlib.contextmanager
def refused(monkeypatch: pytest.MonkeyPatch, after: int = 0) -> Iterator[None]:
    """The system starts so many more threads."""
    start, left = threading.Thread.start, after

    def count(thread: threading.Thread) -> None:
        nonlocal left
        if not left:
            raise RuntimeError("can't start new thread")
        left -= 1
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", count)
        yield


def test_all_of_them_run(monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(3)
    with started(3, "s3kv-test") as executor, refused(monkeypatch):
        works = [executor.submit(together.wait) for _ in range(3)]
        assert sorted(work.result() for work in works) == [0, 1, 2]


def test_each_is_prepared() -> None:
    prepared: list[str] = []
    with started(2, "s3kv-test", lambda: prepared.append(threading.current_thread().name)):
        pass
    assert sorted(prepared) == ["s3kv-test_0", "s3kv-test_1"]


@pytest.mark.parametrize("after", [0, 2])
def test_one_that_the_system_refuses_is_an_error(
    after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        refused(monkeypatch, after),
        pytest.raises(ConfigError, match=r"needs 3 threads \(s3kv-test\).*can't start.*pids\.max"),
    ):
        started(3, "s3kv-test")
