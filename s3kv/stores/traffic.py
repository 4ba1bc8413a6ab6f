"""Traffic counters of a store: requests by verb and by class of answer, and bytes of objects."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

VERBS = ("GET", "PUT", "HEAD", "DELETE", "LIST")
ANSWERS = ("2xx", "3xx", "4xx", "5xx", "none")
"""Classes of status codes; "none": given up, or the connection ended, before an answer."""


@dataclass(slots=True)
class Traffic:
    """Counters since the store was made. requests: by "verb|answer". received_bytes, sent_bytes:
    bodies of requests that were answered 2xx. host, region: where requests go; empty before the
    first."""

    requests: Counter[str] = field(default_factory=Counter)
    received_bytes: int = 0
    sent_bytes: int = 0
    host: str = ""
    region: str = ""

    def note(
        self, verb: str, status: int | None, *, received_bytes: int = 0, sent_bytes: int = 0
    ) -> None:
        """Count a request that has ended. status: of the answer; None if there was none."""
        answer = "none" if status is None else f"{status // 100}xx"
        self.requests[f"{verb}|{answer}"] += 1
        if answer == "2xx":
            self.received_bytes += received_bytes
            self.sent_bytes += sent_bytes
