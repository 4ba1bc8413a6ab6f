"""Orders the caller's CUDA streams against ours. Only `Beside` blocks the host.

On a CPU a call has done its work when it returns, so there is nothing to order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from types import TracebackType

import torch


class Mark:
    """A point in a stream's work."""

    __slots__ = ("_event",)

    def __init__(self, event: torch.cuda.Event | None) -> None:
        self._event = event

    @property
    def passed(self) -> bool:
        """Whether all work before the mark is done. Raises `RuntimeError` if the device failed."""
        return self._event is None or bool(self._event.query())

    def hold_back(self, stream: torch.cuda.Stream | None) -> None:
        """Make later work on `stream` wait for the mark."""
        if self._event is not None and stream is not None:
            stream.wait_event(self._event)


class CallerStream:
    """A stream; on a CPU, a stand-in that does nothing.

    Entered as a context, it is the current stream. The code inside must not `await`, because the
    current stream belongs to the thread, not to a task.
    """

    __slots__ = ("_current", "_stream")

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._stream = stream
        self._current = torch.cuda.stream(stream) if stream is not None else None

    @classmethod
    def current(cls, device: torch.device) -> CallerStream:
        """The current stream of this thread."""
        return cls(torch.cuda.current_stream(device) if device.type == "cuda" else None)

    @classmethod
    def new(cls, device: torch.device) -> CallerStream:
        """A new stream, for work that waits only for marks."""
        if device.type != "cuda":
            return cls(None)
        return cls(torch.cuda.Stream(device))

    def mark(self) -> Mark:
        """A mark behind all work launched on the stream so far."""
        return Mark(None if self._stream is None else self._stream.record_event())

    def wait(self, marks: Iterable[Mark]) -> None:
        """Make later work on the stream wait for all of `marks`."""
        for mark in marks:
            mark.hold_back(self._stream)

    def __enter__(self) -> CallerStream:
        if self._current is not None:
            self._current.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._current is not None:
            self._current.__exit__(kind, error, trace)


class Beside:
    """Runs copies between host memory and a caller's tensors in a thread: after all work that the
    caller launched before this object was made, concurrently with later work.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        """Call on the caller's thread. devices: those of the tensors to copy."""
        self._marks = {
            device: torch.cuda.current_stream(device).record_event()
            for device in set(devices)
            if device.type == "cuda"
        }

    def __call__(self, work: Callable[[], object]) -> None:
        """Run `work`, which may start asynchronous copies, and block until they have ended. Any
        thread may call it. Raises what `work` raises.
        """
        with ExitStack() as stack:
            for device, mark in self._marks.items():
                stream: torch.cuda.Stream = torch.cuda.Stream(device)
                stream.wait_event(mark)
                stack.enter_context(torch.cuda.stream(stream))
                # Also if `work` raises: a copy that it started must not outlive the memory.
                stack.callback(stream.synchronize)
            work()
