"""Copies in progress, from the order to the report of their end: the records of `BlockCopies`.

Nothing here locks or blocks: `BlockCopies` holds its lock for every call.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from s3kv.device.copier import Ticket
from s3kv.device.cpu import FINISHED
from s3kv.messages import CopyPart
from s3kv.types import once_a_minute

logger = logging.getLogger(__name__)

WINDOW_S = 1.2e-3
"""Seconds of copies per direction that may be launched but not finished: more than twice the time
that the copy thread takes to notice new room."""
_ASSUMED_BYTES_PER_S = 64 * 2**20 / WINDOW_S
"""Speed until a copy has been measured: 56 GB/s, that of a PCIe 5 bus."""
_NEWEST = 0.25
"""Weight of the newest copy in the mean of copies of about its length."""


class CopyMark(NamedTuple):
    """A point in the engine's work, from `BlockCopies.mark`. ok: the device could record it."""

    at: Any
    ok: bool


class FailureLog:
    """Logs each kind of failure at most once a minute, because a broken device fails every copy."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._is_due = once_a_minute(clock)

    def note(self, text: str, error: Exception) -> None:
        if self._is_due(type(error)):
            logger.error("s3kv: %s: %s", text, error, exc_info=error)


class LaunchWindow:
    """The copies of one direction that are launched but not finished, in order. The times of
    finished copies give the expected time of others of about their length."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.seconds = WINDOW_S
        self._clock = clock
        self._bytes_per_s: dict[int, float] = {}
        """Mean rate by the bit length of a copy's size. One hiccup weighs little in such a mean."""
        self._launched: deque[tuple[Ticket, float]] = deque()
        """The copies, each with its expected seconds."""
        self._begun_s: float | None = None
        """The time at which the first of them was found to have begun."""

    def add(self, ticket: Ticket) -> None:
        if ticket.nbytes:  # a synchronous copy is over
            rate = self._bytes_per_s.get(ticket.nbytes.bit_length(), _ASSUMED_BYTES_PER_S)
            self._launched.append((ticket, ticket.nbytes / rate))

    def has_room(self) -> bool:
        """Whether another copy may be launched. Queries the device only if the window is full."""
        if self._left_s() < self.seconds:
            return True
        while self._launched and _holds(self._launched[0][0].done):
            self._learn(self._launched.popleft()[0])
            self._begun_s = None
        if self._launched and self._begun_s is None and _holds(self._launched[0][0].begun):
            self._begun_s = self._clock()
        return self._left_s() < self.seconds

    def _left_s(self) -> float:
        """Seconds until all are expected to have ended, if nothing holds them up."""
        left_s = sum(expected_s for _, expected_s in self._launched)
        if self._begun_s is None:
            return left_s
        return left_s - min(self._launched[0][1], self._clock() - self._begun_s)

    def _learn(self, ticket: Ticket) -> None:
        if ticket.seconds:
            size, rate = ticket.nbytes.bit_length(), ticket.nbytes / ticket.seconds
            mean = self._bytes_per_s.get(size, rate)
            self._bytes_per_s[size] = mean + _NEWEST * (rate - mean)


def _holds(query: Callable[[], bool]) -> bool:
    try:
        return query()
    except RuntimeError:  # the job of this ticket ends as failed, and logs it
        return True


_Id = TypeVar("_Id", bound=int | str)


@dataclass(slots=True, eq=False)
class CopyJob(Generic[_Id]):
    """One save or load in progress, in parts. The last part's ticket stands for the job."""

    ident: _Id
    queue: CopyQueue[_Id]
    parts: deque[CopyPart]
    """Parts that have not been started."""
    at: Any
    """The point in the engine's work after which it copies."""
    since_s: float
    ticket: Ticket = FINISHED
    ok: bool = True
    started: bool = False
    """Whether all parts have been started, or the job has failed."""

    def start(self, ticket: Ticket, ok: bool) -> None:
        """Record that no part is left to start. A second call does nothing: if the job is submitted
        while the copy thread ends, both threads call this."""
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
        except RuntimeError as error:
            self.queue.failures.note(f"the device failed during copy {self.ident}", error)
            self.ok, self.ticket = False, FINISHED
            return True


class CopyQueue(Generic[_Id]):
    """All jobs of one direction. copy: starts one part, after a point in the engine's work."""

    def __init__(
        self,
        copy: Callable[[CopyPart, Any], Ticket],
        failures: FailureLog,
        clock: Callable[[], float],
    ) -> None:
        self.copy = copy
        self.failures = failures
        self.jobs: dict[_Id, CopyJob[_Id]] = {}
        """All jobs not reported yet."""
        self.waiting: deque[CopyJob[_Id]] = deque()
        """Jobs with parts that have not been started, in the order given."""
        self.started: deque[CopyJob[_Id]] = deque()
        """Jobs to report, in the order in which they were started and will end."""
        self.window = LaunchWindow(clock)

    def may_start(self) -> bool:
        return bool(self.waiting) and self.window.has_room()

    def ended(self) -> Iterator[CopyJob[_Id]]:
        """Take out the jobs that have ended."""
        while self.started and self.started[0].is_done():
            job = self.started.popleft()
            del self.jobs[job.ident]
            yield job
