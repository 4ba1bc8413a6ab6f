"""Speeds of receiving and decoding, and whether compression pays off at them. Pure.

A compressed object takes less time on the wire, and more CPU time. Decoding keeps up with the wire
where the threads decode faster than the wire delivers, and then costs a hit only the last segment.
Decoding is measured by wall-clock time, which includes its slowdown while the cores are busy.
"""

from __future__ import annotations

ON_BELOW, OFF_ABOVE = 0.25, 0.35
"""Speed of the wire, as a fraction of the decoding threads', below which compression starts, and
above which it stops. A wire nearly as fast as memory is within the host: receiving from it takes
the cores that decoding needs."""
_HALVED_AFTER_BYTES = 2**30
"""Bytes after which older ones count half."""
_MOST_PERIODS = 32
_FEWEST_BYTES = 2**25
"""Minimum number of bytes for a known speed: a burst may come from a buffer."""


class _Speed:
    """Bytes per second of the time in which any were moved."""

    def __init__(self) -> None:
        self._nbytes = self._seconds = 0.0

    def add(self, nbytes: int, seconds: float) -> None:
        if self._nbytes > _HALVED_AFTER_BYTES:
            self._nbytes, self._seconds = self._nbytes / 2, self._seconds / 2
        self._nbytes += nbytes
        self._seconds += seconds

    @property
    def bytes_per_s(self) -> float | None:
        """None if too little was moved to know."""
        is_known = self._nbytes >= _FEWEST_BYTES and self._seconds > 0
        return self._nbytes / self._seconds if is_known else None


class Speeds:
    """Measured speeds of one I/O process. Times are seconds of one clock, passed in."""

    def __init__(self) -> None:
        self._wire, self._decoding = _Speed(), _Speed()
        self._receiving_s: list[tuple[float, float]] = []
        """The last periods of receptions, without overlaps."""

    def received(self, nbytes: int, begin_s: float, end_s: float) -> None:
        """Record an object that arrived in this period. Concurrent arrivals share its time."""
        end_s = max(begin_s, end_s)  # two threads have read the clock
        alone_s, joined_s = end_s - begin_s, (begin_s, end_s)
        apart: list[tuple[float, float]] = []
        for first_s, last_s in self._receiving_s:
            if last_s < begin_s or first_s > end_s:
                apart.append((first_s, last_s))
                continue
            alone_s -= min(last_s, end_s) - max(first_s, begin_s)
            joined_s = min(first_s, joined_s[0]), max(last_s, joined_s[1])
        self._receiving_s = [*apart, joined_s][-_MOST_PERIODS:]
        self._wire.add(nbytes, alone_s)

    def decoded(self, nbytes: int, seconds: float) -> None:
        """Record an object of `nbytes` when decoded, which took a thread `seconds`."""
        self._decoding.add(nbytes, seconds)

    @property
    def wire_bytes_per_s(self) -> float | None:
        """Speed of all receptions together. None if too little was received to know."""
        return self._wire.bytes_per_s

    @property
    def decoding_bytes_per_s(self) -> float | None:
        """Speed of one thread, in decoded bytes. None if too little was decoded to know."""
        return self._decoding.bytes_per_s


def pays(wire: float | None, decoding: float, *, before: bool) -> bool:
    """Whether compression pays off. wire: speed of the wire; None if not known: compression then
    pays off, because it always saves storage. decoding: speed of all threads. before: the last
    answer, which stands between the two limits."""
    share = 0.0 if wire is None else wire / decoding
    return share < (OFF_ABOVE if before else ON_BELOW)
