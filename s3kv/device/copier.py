"""What `BlockCopies` asks of a kind of device. `cpu.py` and `gpu_copier.py` implement it."""

from __future__ import annotations

from typing import Any, Protocol

from s3kv.device.paths import Choice
from s3kv.messages import LoadPart


class Ticket(Protocol):
    """What a copy that was started is known by. For the engine's thread."""

    def done(self) -> bool:
        """True once all bytes are in place. Does not block. Raises `RuntimeError` when the device
        failed.
        """

    def fence(self) -> None:
        """Make what the engine launches from now on wait until the source has been read. Does not
        block; must not be called before the copy was started.
        """


class Copier(Protocol):
    """Starts copies of one chunk. All but `mark` and `close` run on the copy thread. Those of one
    direction end in the order they were started.
    """

    pinned: bool
    choices: tuple[Choice, ...]
    """The path of each group and direction, where there is more than one."""

    def mark(self) -> Any:
        """A point in the engine's work, now, for one copy; for the engine's thread. Does not
        block. Work of other streams counts only if the current one waits for it already.
        """

    def enter_thread(self) -> None:
        """Called once, first, on the copy thread."""

    def copy_out(self, part: LoadPart, mark: Any) -> Ticket:
        """Copy blocks to a slot, after `mark`. Raises one of `COPY_ERRORS`."""

    def copy_in(self, part: LoadPart, mark: Any, *, is_last: bool) -> Ticket | None:
        """Copy from a slot to blocks, after `mark`. Raises one of `COPY_ERRORS`.

        Parts of several loads are never mixed; the last one gives the ticket for all of its load.
        """

    def settle(self) -> None:
        """Block until nothing started so far touches memory any more; after an error, where there
        is no ticket to ask.
        """

    def close(self) -> None:
        """Give everything back, after the copy thread has ended. Idempotent."""


COPY_ERRORS = (RuntimeError, ValueError, IndexError, TypeError, OSError)
"""What a copy may raise: torch's errors (out of memory and device failures are RuntimeErrors) and
those of our own checks. Anything else is a bug; it ends the copy thread, and with it every copy."""
