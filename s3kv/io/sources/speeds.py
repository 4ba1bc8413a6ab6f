"""Speeds of receiving and decoding, and whether compressing pays with them. Pure.

A compressed object takes less time on the wire, and more of the cores. Decoding keeps up with the
wire where the threads decode faster than the wire delivers, and then costs a hit nothing but the
last segment. As cores get busy, decoding gets slower by the clock, which is the clock that counts.
"""

from __future__ import annotations

ON_BELOW, OFF_ABOVE = 0.25, 0.35
"""Speed of the wire as a share of the decoding threads' below which compressing begins, and above
which it ends. A wire that is nearly as fast as memory is a host's own: receiving from it takes the
cores that decoding needs."""
_HALVED_AFTER_BYTES = 2**30
"""Bytes after which older ones count half."""
_MOST_PERIODS = 32
_FEWEST_BYTES = 2**25
"""Bytes below which a speed is not known: a burst may come out of a buffer."""


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
        """The last periods of receptions, none of which overlap."""

    def received(self, nbytes: int, begin_s: float, end_s: float) -> None:
        """Note an object that arrived meanwhile. Those that arrive at once share their time."""
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
        """Note an object of so many bytes, decoded, that took a thread so long."""
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
    """Whether compressing pays. wire: its speed; None if it is not known: then it does, because it
    saves storage in any case. decoding: speed of all threads. before: the last answer, which stands
    in between the two limits."""
    share = 0.0 if wire is None else wire / decoding
    return share < (OFF_ABOVE if before else ON_BELOW)
