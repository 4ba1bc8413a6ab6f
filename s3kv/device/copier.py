"""`Copier`: the interface between `BlockCopies` and a kind of device (`cpu`, `gpu.gpu_copier`)."""

from __future__ import annotations

from typing import Any, Protocol

from s3kv.messages import CopyPart


class Ticket(Protocol):
    """A started copy. Any thread may use it, but only one at a time.

    nbytes: the bytes it moves over the bus; 0 for a copy that has ended already. seconds: the time
    on the bus; 0 until `done`, or if not measured.
    """

    nbytes: int
    seconds: float

    def begun(self) -> bool:
        """Whether the bus has reached it. Does not block. Raises as `done` does."""

    def done(self) -> bool:
        """Whether all bytes are in place. Does not block. `RuntimeError`: the device failed."""

    def fence(self) -> None:
        """Make the engine's later work wait until the source has been read. Does not block."""


class Copier(Protocol):
    """Starts copies of one chunk. All methods but `mark` and `close` run on the copy thread.
    Copies in one direction end in the order they were started."""

    pinned: bool

    def mark(self) -> Any:
        """The present point in the engine's work, for any number of copies: on its current stream,
        and on those it already waits for. Called on the engine's thread; does not block."""

    def enter_thread(self) -> None:
        """Prepare the copy thread; called on it once, before any copy."""

    def copy_out(self, part: CopyPart, mark: Any) -> Ticket:
        """Copy blocks to a slot, after `mark`. Raises one of `COPY_ERRORS`."""

    def copy_in(self, part: CopyPart, mark: Any) -> Ticket:
        """Copy from a slot to blocks, after `mark`. Raises one of `COPY_ERRORS`."""

    def settle(self) -> None:
        """Block until no copy touches memory. Called after an error, when there is no ticket."""

    def close(self) -> None:
        """Release everything. Called after the copy thread has ended. Idempotent."""


COPY_ERRORS = (RuntimeError, ValueError, IndexError, TypeError, OSError)
"""The errors a copy may raise: torch's (out of memory and device failures are RuntimeErrors) and
those of our checks. Any other is a bug; it ends the copy thread, and with it every copy."""
