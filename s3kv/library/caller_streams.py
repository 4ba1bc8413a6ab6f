"""Orders the caller's CUDA streams against ours. Only `Beside` blocks the host.

On a CPU a call has done its work when it returns, so there is nothing to order: streams and marks
are None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TypeAlias

import torch

CallerStream: TypeAlias = torch.cuda.Stream | None
Mark: TypeAlias = torch.cuda.Event | None
"""A point in a stream's work."""


def current_stream(device: torch.device) -> CallerStream:
    """The current stream of this thread."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def new_stream(device: torch.device) -> CallerStream:
    """A new stream, for work that waits only for marks."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None


def on(stream: CallerStream) -> AbstractContextManager[object]:
    """Makes the stream, and its device, the current one. The code inside must not `await`, because
    the current stream belongs to the thread, not to a task."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def mark(stream: CallerStream) -> Mark:
    """A mark behind all work launched on the stream so far."""
    return None if stream is None else stream.record_event()


def has_passed(mark: Mark) -> bool:
    """Whether all work before the mark is done. Raises `RuntimeError` if the device failed."""
    return mark is None or bool(mark.query())


def wait(stream: CallerStream, marks: Iterable[Mark]) -> None:
    """Make later work on the stream wait for all of `marks`."""
    for mark in marks:
        if stream is not None and mark is not None:
            stream.wait_event(mark)


class Beside:
    """Runs copies between host memory and a caller's tensors in a thread: after all work that the
    caller launched before this object was made, concurrently with later work."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        """Call on the caller's thread. devices: those of the tensors to copy."""
        self._marks = {
            device: torch.cuda.current_stream(device).record_event()
            for device in set(devices)
            if device.type == "cuda"
        }

    def __call__(self, work: Callable[[], object]) -> None:
        """Run `work`, which may start asynchronous copies, and block until they have ended. Any
        thread may call it. Raises what `work` raises."""
        with ExitStack() as stack:
            for device, mark in self._marks.items():
                stream: torch.cuda.Stream = torch.cuda.Stream(device)
                stream.wait_event(mark)
                stack.enter_context(torch.cuda.stream(stream))
                # Also if `work` raises: a copy that it started must not outlive the memory.
                stack.callback(stream.synchronize)
            work()
