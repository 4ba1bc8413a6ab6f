"""`Arrival`: the receiver of a read that may be one of two for the same place."""

from __future__ import annotations

from collections.abc import Callable

from s3kv.io.sources.hedging import Claim
from s3kv.place import Place


class Arrival:
    """A `Receiver` that lands if its claim is granted.

    land: the memory for the requested bytes, given the length of the whole object. arrived: called
    as `Receiver.arrived`. Both are called in the thread that receives, and only after the claim has
    been granted.
    """

    def __init__(
        self,
        claim: Claim,
        land: Callable[[int], Place | None],
        arrived: Callable[[int], None] | None = None,
    ) -> None:
        self._claim, self._land, self._arrived = claim, land, arrived

    def begin(self, nbytes: int) -> Place | None:
        return self._land(nbytes) if self._claim() else None

    def arrived(self, nbytes: int) -> None:
        if self._arrived is not None:
            self._arrived(nbytes)
