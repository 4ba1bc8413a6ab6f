"""Items as requests want them, and how long their objects are as far as it is known before.

A prompt tells how many rows an item has; how wide a row is, only the first item of a modality does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from s3kv.objects.items import object_bytes, width_of
from s3kv.types import ChunkKey

_WIDEST = 8
"""How many times wider than the model's own embeddings an encoder's output may be until the first
one has told: some models put the features of several layers side by side."""


class Wanted(NamedTuple):
    """One item as a request needs it. `modality` only tells items of one width together."""

    identifier: str
    key: ChunkKey
    rows: int
    modality: str


class ItemSizes:
    """dtype: of all items, as safetensors names it. width: of the model's own embeddings.
    most: bytes there are for one. widths: of the encoder's output, by modality, as far as they are
    known already.
    """

    def __init__(
        self, dtype: str, width: int, most: int, widths: Mapping[str, int] | None = None
    ) -> None:
        self._dtype = dtype
        self._width = width
        self._most = most
        self._widths = dict(widths or {})

    def room(self, wanted: Wanted) -> int | None:
        """How long its object may be; None for one that is too long for certain."""
        known = self._widths.get(wanted.modality)
        least = object_bytes(self._dtype, wanted.rows, known or self._width)
        if least > self._most:
            return None
        if known is not None:
            return least
        return min(self._most, object_bytes(self._dtype, wanted.rows, _WIDEST * self._width))

    def expected(self, wanted: Wanted) -> int:
        width = self._widths.get(wanted.modality, self._width)
        return object_bytes(self._dtype, wanted.rows, width)

    def width(self, wanted: Wanted, nbytes: int) -> int:
        """Of an item that has arrived with this length and was verified."""
        width = width_of(self._dtype, wanted.rows, nbytes)
        assert width is not None, "a whole number of rows was verified"
        return width

    def arrived(self, wanted: Wanted, nbytes: int) -> None:
        """It had this length and was verified."""
        self._widths.setdefault(wanted.modality, self.width(wanted, nbytes))
