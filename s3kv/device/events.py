"""Events that are used again, and what a copy on a GPU is known by."""

from __future__ import annotations

from s3kv.device.gpu import Event, Gpu


class EventPool:
    """Making and destroying an event costs the driver more than recording it. Any thread."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._free: list[Event] = []

    def take(self) -> Event:
        try:
            return self._free.pop()
        except IndexError:
            return self._gpu.new_event()

    def give(self, event: Event) -> None:
        """Nobody may ask `event` any more; who waits for it on the GPU goes on waiting."""
        self._free.append(event)


class EventTicket:
    """For the engine's thread.

    source_read: passes once the copy's source may be overwritten; often the same as `finished`.
    finished: passes at the copy's end. Both are the ticket's, which gives them back.
    """

    __slots__ = ("_done", "_events", "_finished", "_gpu", "_source_read")

    def __init__(self, gpu: Gpu, events: EventPool, source_read: Event, finished: Event) -> None:
        self._gpu = gpu
        self._events = events
        self._source_read = source_read
        self._finished = finished
        self._done = False

    def done(self) -> bool:
        if not self._done and self._finished.query():
            self._done = True
            self._events.give(self._finished)
            if self._source_read is not self._finished:
                self._events.give(self._source_read)
        return self._done

    def fence(self) -> None:
        if not self._done:
            self._gpu.current_stream().wait(self._source_read)
