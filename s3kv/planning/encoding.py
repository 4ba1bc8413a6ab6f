"""How fast items are fetched and how fast they are encoded: what `pace.wait_until_s` weighs.

The rule is that of the KV cache, with encoding in the place of computing.
"""

from __future__ import annotations

from s3kv.planning.pace import FetchTime

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

    def gave_up(self, waited_s: float) -> None:
        """What was on its way had not come after so long."""
        self._fetch.gave_up(waited_s)

    def fetch_s(self, nbytes: int) -> float | None:
        """Expected time until that much has arrived; None while nothing is known."""
        return self._fetch.at(nbytes)

    def patience_s(self, nbytes: int) -> float:
        """How long nothing may come of that much on its way."""
        return self._fetch.patience_s(nbytes)

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
