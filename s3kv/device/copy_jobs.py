"""Copies on their way, from the order to the report of their end; what `BlockCopies` keeps.

Nothing here locks or blocks: `BlockCopies` holds its lock for every call.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

from s3kv.device.copier import Ticket
from s3kv.device.cpu import FINISHED
from s3kv.messages import LoadPart

logger = logging.getLogger(__name__)

WINDOW_BYTES = 64 * 2**20
"""Bytes of a direction that may be launched and not finished: 1.2 ms of a bus of 54 GB/s, more than
twice the time in which the copy thread notices that there is room again."""
WINDOW_COPIES = 2
"""Copies that may be launched and not finished whatever their size: one runs while the next is
launched."""


class CopyMark(NamedTuple):
    """A point in the engine's work, from `BlockCopies.mark`, for any number of copies. ok: whether
    the device could record it.
    """

    at: Any
    ok: bool


class LaunchWindow:
    """The copies of one direction that are launched and not finished, in order.

    What is launched can be overtaken by nothing, so as little as keeps the bus busy is.
    """

    def __init__(self, nbytes: int = WINDOW_BYTES) -> None:
        self.nbytes = nbytes
        self._launched: deque[Ticket] = deque()
        self._launched_bytes = 0

    def add(self, ticket: Ticket) -> None:
        if ticket.nbytes:  # a synchronous copy is over
            self._launched.append(ticket)
            self._launched_bytes += ticket.nbytes

    def has_room(self) -> bool:
        """Whether another copy may be launched. Asks the device only if the window is full."""
        if self._fits():
            return True
        while self._launched and _is_over(self._launched[0]):
            self._launched_bytes -= self._launched.popleft().nbytes
        return self._fits()

    def _fits(self) -> bool:
        return len(self._launched) < WINDOW_COPIES or self._launched_bytes < self.nbytes


def _is_over(ticket: Ticket) -> bool:
    try:
        return ticket.done()
    except RuntimeError:  # the job of this ticket ends as failed, and says so
        return True


_Id = TypeVar("_Id", bound=int | str)


class CopyJob(Generic[_Id]):
    """One save or load on its way, in parts, of which the last one's ticket stands for the job."""

    __slots__ = ("at", "ident", "ok", "parts", "queue", "since_s", "started", "ticket")

    def __init__(
        self, ident: _Id, queue: CopyQueue[_Id], parts: Iterable[LoadPart], at: Any, now: float
    ) -> None:
        self.ident: _Id = ident
        self.queue = queue
        self.parts = deque(parts)
        """Parts that have not been started."""
        self.at = at
        """The point in the engine's work after which it copies."""
        self.since_s = now
        self.ticket: Ticket = FINISHED
        self.ok = True
        self.started = False
        """Whether all parts have been started, or the job has failed."""

    def start(self, ticket: Ticket, ok: bool) -> None:
        """Record that no part is left to start. A second call does nothing: if the job is submitted
        while the copy thread ends, both threads call this.
        """
        if self.started:
            return
        self.parts.clear()
        self.ticket, self.ok, self.started = ticket, ok, True
        self.queue.started.append(self)

    def is_done(self) -> bool:
        if not self.started:
            return False
        try:
            return self.ticket.done()
        except RuntimeError:
            logger.exception("s3kv: the device failed during copy %s", self.ident)
            self.ok, self.ticket = False, FINISHED
            return True


class CopyQueue(Generic[_Id]):
    """All jobs of one direction. copy: starts a part of one, after a point in the engine's work."""

    def __init__(self, copy: Callable[[LoadPart, Any], Ticket]) -> None:
        self.copy = copy
        self.jobs: dict[_Id, CopyJob[_Id]] = {}
        """All that were not reported."""
        self.waiting: deque[CopyJob[_Id]] = deque()
        """Jobs of which parts have not been started, in the order given."""
        self.started: deque[CopyJob[_Id]] = deque()
        """Jobs to be reported, in the order in which they were started, and so will end."""
        self.window = LaunchWindow()

    def may_start(self) -> bool:
        return bool(self.waiting) and self.window.has_room()

    def ended(self) -> Iterator[CopyJob[_Id]]:
        """Take out the jobs that have ended."""
        while self.started and self.started[0].is_done():
            job = self.started.popleft()
            del self.jobs[job.ident]
            yield job
