"""How fast items are fetched and how fast they are encoded, and whether a wait still pays.

The rule is that of the KV cache (`planning.pace`), with encoding in the place of computing:
a request waits for items on their way only while

1. they are expected to arrive sooner than the engine would encode them,
2. it has not waited as long as encoding all it hoped for would have taken,
3. something has arrived for it within the last `PATIENCE_S`, and
4. it has not waited `max_wait_s`.
"""

from __future__ import annotations

import math

from s3kv.planning.pace import PATIENCE_S, FetchTime

_SMOOTHING = 0.2
"""Weight of a new sample: five or so settle a change."""


class EncodingPace:
    """Measured speeds. encode_rows_per_s: assumed until an encoder run has been measured."""

    __slots__ = ("_encode_measured", "_encode_rows_per_s", "_fetch")

    def __init__(self, *, encode_rows_per_s: float) -> None:
        self._encode_rows_per_s = encode_rows_per_s
        self._encode_measured = False
        self._fetch = FetchTime()
        """A latency, and a share for each byte."""

    def fetched(self, nbytes: int, seconds: float) -> None:
        """An item arrived, `seconds` after its request was sent."""
        self._fetch.add(nbytes, seconds)

    def gave_up(self, nbytes: int, waited_s: float) -> None:
        """So many bytes had not come after so long: that is a measurement, too."""
        expected_s = self.fetch_s(nbytes)
        if expected_s is None or expected_s < waited_s:
            self.fetched(nbytes, waited_s)

    def fetch_s(self, nbytes: int) -> float | None:
        """Expected time until that much has arrived; None before the first arrival."""
        return self._fetch.at(nbytes) if self._fetch.is_measured else None

    def encoded(self, rows: int, seconds: float) -> None:
        """The encoder made so many rows in so long."""
        if rows < 1 or seconds <= 0:
            return
        # What was assumed before the first measurement does not count any more after it.
        weight = _SMOOTHING if self._encode_measured else 1.0
        self._encode_rows_per_s += weight * (rows / seconds - self._encode_rows_per_s)
        self._encode_measured = True

    def encode_s(self, rows: int) -> float:
        """Expected time to encode items of so many rows."""
        return rows / self._encode_rows_per_s


def wait_until_s(
    pace: EncodingPace,
    *,
    started_s: float,
    arrival_s: float,
    hoped_rows: int,
    missing_rows: int,
    bytes_ahead: int,
    max_wait_s: float,
    gate: bool,
) -> float:
    """Until when a request may wait if nothing new happens; a time not after now means: stop.

    started_s, arrival_s: when the wait began, and when something last arrived for it.
    hoped_rows: of all the items it waited for, as of `started_s`; missing_rows: of those that have
    not arrived. bytes_ahead: on their way and arriving no later than the last of them.
    """
    hard_s = started_s + max_wait_s
    if not gate:
        return hard_s
    expected_s = pace.fetch_s(bytes_ahead)
    if expected_s is not None and expected_s >= pace.encode_s(missing_rows):
        return -math.inf
    return min(hard_s, started_s + pace.encode_s(hoped_rows), arrival_s + PATIENCE_S)
