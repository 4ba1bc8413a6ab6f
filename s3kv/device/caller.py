"""What comes before what between the streams of a caller and our own. Nothing here blocks the host,
but `Beside`. On a CPU everything has happened when a call returns, and there is nothing to order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from types import TracebackType

import torch


class Mark:
    """A point in the work of a stream."""

    __slots__ = ("_event",)

    def __init__(self, event: torch.cuda.Event | None) -> None:
        self._event = event

    @property
    def passed(self) -> bool:
        """Whether everything before it has been done. Raises `RuntimeError` when the device has
        failed.
        """
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def hold_back(self, stream: torch.cuda.Stream | None) -> None:
        """What is launched on `stream` from now on waits for the mark."""
        if self._event is not None and stream is not None:
            stream.wait_event(self._event)


class CallerStream:
    """A stream, or a CPU's one order of things. As a context it is the current stream, for code
    without an `await`: what is current belongs to the thread and not to a task.
    """

    __slots__ = ("_current", "_stream")

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._stream = stream
        self._current = torch.cuda.stream(stream) if stream is not None else None

    @classmethod
    def current(cls, device: torch.device) -> CallerStream:
        """The stream that is current now, in this thread."""
        return cls(torch.cuda.current_stream(device) if device.type == "cuda" else None)

    @classmethod
    def new(cls, device: torch.device) -> CallerStream:
        """One of our own, for what waits for marks alone."""
        if device.type != "cuda":
            return cls(None)
        return cls(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]

    def mark(self) -> Mark:
        """Behind everything launched on it so far."""
        return Mark(None if self._stream is None else self._stream.record_event())

    def wait(self, marks: Iterable[Mark]) -> None:
        """What is launched on it from now on comes after all of these."""
        for mark in marks:
            mark.hold_back(self._stream)

    def __enter__(self) -> CallerStream:
        if self._current is not None:
            self._current.__enter__()  # type: ignore[no-untyped-call]
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
    """Copies between host memory and a caller's tensors, in a thread: after everything the caller
    has launched when this is made, and beside what it launches later.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        """For the caller's thread. devices: where the tensors are that the copies touch."""
        self._marks = {
            device: torch.cuda.current_stream(device).record_event()
            for device in set(devices)
            if device.type == "cuda"
        }

    def __call__(self, work: Callable[[], object]) -> None:
        """Run `work`, which may leave copies under way, and wait until they have ended. For any
        thread. Raises what `work` raises.
        """
        with ExitStack() as stack:
            for device, mark in self._marks.items():
                stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                stream.wait_event(mark)
                stack.enter_context(torch.cuda.stream(stream))
                # Also when `work` raises: what it has begun must not outlive the memory.
                stack.callback(stream.synchronize)
            work()
