"""Encoder items as requests need them, their lengths, and the measured speeds of moving them.

The prompt gives an item's number of rows; the first item of a modality gives their width. Waits for
items follow the rule for chunks (`deadline`), with encoding in place of computing.
"""

from __future__ import annotations

from typing import NamedTuple

from s3kv.objects.item_format import object_bytes, width_of
from s3kv.planning.pace import FetchPace
from s3kv.types import ChunkKey

_SMOOTHING = 0.2
"""Weight of a new speed sample: the average follows a change after about five samples."""
_WIDEST = 8
"""Assumed limit on the width of an encoder's output until the first one has been seen, in widths of
the model's embeddings: some models concatenate the features of several layers."""


class Wanted(NamedTuple):
    """An item as a request needs it. `modality` only groups items of equal width."""

    identifier: str
    key: ChunkKey
    rows: int
    modality: str


class ItemSizes:
    """Lengths of items' objects.

    dtype: safetensors name of all items' dtype. width: width of the model's embeddings. most:
    length of the largest object that fits, in bytes.
    """

    def __init__(self, dtype: str, width: int, most: int) -> None:
        self._dtype = dtype
        self._width = width
        self._most = most
        self._widths: dict[str, int] = {}
        """Widths of the encoder's output, by modality, once known."""

    def room(self, wanted: Wanted) -> int | None:
        """Largest possible length of its object, in bytes; None if it is certainly too long."""
        least = self.expected(wanted)
        if least > self._most:
            return None
        if wanted.modality in self._widths:
            return least
        return min(self._most, object_bytes(self._dtype, wanted.rows, _WIDEST * self._width))

    def expected(self, wanted: Wanted) -> int:
        width = self._widths.get(wanted.modality, self._width)
        return object_bytes(self._dtype, wanted.rows, width)

    def width(self, wanted: Wanted, nbytes: int) -> int:
        """Width of an item whose verified object has this length."""
        width = width_of(self._dtype, wanted.rows, nbytes)
        assert width is not None, "a whole number of rows was verified"
        return width

    def arrived(self, wanted: Wanted, nbytes: int) -> None:
        """Derive the width of the item's modality from the length of its verified object."""
        self._widths.setdefault(wanted.modality, self.width(wanted, nbytes))


class EncodingPace(FetchPace):
    """Speeds of one engine. The time of an item's fetch depends on the bytes that arrive up to its
    end. encode_rows_per_s: value assumed before the first measurement."""

    def __init__(self, *, encode_rows_per_s: float) -> None:
        super().__init__()
        self._encode_rows_per_s = encode_rows_per_s
        self._encode_measured = False

    def encoded(self, rows: int, seconds: float) -> None:
        """Note that the encoder took `seconds` for `rows` rows."""
        if rows < 1 or seconds <= 0:
            return
        # The first measurement replaces the assumed speed.
        weight = _SMOOTHING if self._encode_measured else 1.0
        self._encode_rows_per_s += weight * (rows / seconds - self._encode_rows_per_s)
        self._encode_measured = True

    def encode_s(self, rows: int) -> float:
        """Expected time to encode items with `rows` rows in total."""
        return rows / self._encode_rows_per_s
