"""Which stream waits for which, with streams that only keep a record."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from s3kv.library.caller_streams import (
    Beside,
    current_stream,
    has_passed,
    mark,
    new_stream,
    on,
    wait,
)

CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")


class Recorder:
    """Stands for `torch.cuda`: which streams there are, and what they were told."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.made = 0
        self.current = self.named("caller")

    def named(self, name: str) -> SimpleNamespace:
        def record() -> SimpleNamespace:
            self.log.append(f"{name} records")
            return SimpleNamespace(of=name, query=lambda: name != "busy")

        return SimpleNamespace(
            name=name,
            record_event=record,
            wait_event=lambda event: self.log.append(f"{name} waits for {event.of}"),
            synchronize=lambda: self.log.append(f"host waits for {name}"),
        )

    def new(self, device: torch.device) -> SimpleNamespace:
        self.made += 1
        return self.named(f"side {self.made}")

    @contextmanager
    def on(self, stream: SimpleNamespace) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(torch.cuda, "Stream", recorder.new)
    monkeypatch.setattr(torch.cuda, "stream", recorder.on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: recorder.current)
    return recorder


def test_a_stream_waits_for_marks_of_others(cuda: Recorder) -> None:
    caller, own = current_stream(CUDA), new_stream(CUDA)
    wait(own, [mark(caller), None])
    with on(own):
        assert cuda.current.name == "side 1"
    assert cuda.current.name == "caller"
    assert cuda.log == ["caller records", "side 1 waits for caller"]


def test_a_mark_tells_when_it_has_passed(cuda: Recorder) -> None:
    assert has_passed(mark(current_stream(CUDA)))
    cuda.current = cuda.named("busy")
    assert not has_passed(mark(current_stream(CUDA)))


@pytest.mark.parametrize("fails", [False, True])
def test_copies_beside_are_over_before_anything_else(cuda: Recorder, fails: bool) -> None:
    beside = Beside([CUDA, CPU, CUDA])

    def work() -> None:
        cuda.log.append(f"work on {cuda.current.name}")
        if fails:
            raise RuntimeError("the copy was refused")

    if fails:
        with pytest.raises(RuntimeError, match="refused"):
            beside(work)
    else:
        beside(work)
    assert cuda.log == [
        "caller records",
        "side 1 waits for caller",
        "work on side 1",
        "host waits for side 1",
    ]
    assert cuda.current.name == "caller"
