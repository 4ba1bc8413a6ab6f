"""Rate-limited log of failed jobs."""

from __future__ import annotations

import logging
from collections.abc import Callable

from s3kv.messages import JobEnd, JobKind
from s3kv.types import Outcome, once_a_minute

logger = logging.getLogger("s3kv")

_TROUBLE = (Outcome.CORRUPT, Outcome.FAILED, Outcome.INVALID)


class JobEndLog:
    """Logs each kind of failure at most once a minute, because an outage fails thousands of jobs. A
    denial is logged once until that kind of job succeeds again, because a person has to act first.
    clock: seconds, monotonic."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._is_due = once_a_minute(clock)
        self._denied: set[JobKind] = set()

    def note(self, end: JobEnd) -> None:
        """Note the end of a job."""
        kind, outcome = end.kind, end.outcome
        if outcome.is_success and kind in self._denied:
            self._denied.discard(kind)
            logger.warning("s3kv: %s is allowed again", kind.value)
        elif outcome is Outcome.DENIED and kind not in self._denied:
            self._denied.add(kind)
            logger.error("s3kv: %s denied; s3kv serves without it: %s", kind.value, end.detail)
        elif outcome in _TROUBLE and self._is_due((kind, outcome)):
            logger.warning("s3kv: %s %s: %s", kind.value, outcome.name.lower(), end.detail)
