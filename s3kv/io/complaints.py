"""What the log hears of jobs that fail: an outage fails thousands; one line a minute tells it."""

from __future__ import annotations

import logging
from collections.abc import Callable

from s3kv.types import Outcome

logger = logging.getLogger("s3kv")

_SAY_AGAIN_S = 60.0
_TROUBLE = (Outcome.CORRUPT, Outcome.FAILED)


class Complaints:
    """Says each kind of trouble once a minute, and what is denied once, until it is allowed again:
    nothing changes before somebody has acted. clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._said_s: dict[tuple[str, Outcome], float] = {}
        self._denied: set[str] = set()

    def note(self, what: str, outcome: Outcome, detail: str) -> None:
        """A job ended so; `what` kind of job it was."""
        if outcome.is_success and what in self._denied:
            self._denied.discard(what)
            logger.warning("s3kv: %s is allowed again", what)
        elif outcome is Outcome.DENIED and what not in self._denied:
            self._denied.add(what)
            logger.error("s3kv: %s denied, goes on without: %s", what, detail)
        elif outcome in _TROUBLE:
            self._say_now_and_then(what, outcome, detail)

    def _say_now_and_then(self, what: str, outcome: Outcome, detail: str) -> None:
        now_s = self._clock()
        said_s = self._said_s.get((what, outcome))
        if said_s is None or now_s - said_s >= _SAY_AGAIN_S:
            self._said_s[what, outcome] = now_s
            logger.warning("s3kv: %s %s: %s", what, outcome.name.lower(), detail)
