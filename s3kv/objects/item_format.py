"""Items in the object format: objects of one tensor, of different lengths.

An item is an encoder's output for one image or clip: a tensor [rows, width], one row for each token
it represents. It is written like a chunk (`codec`), with the tensor `TENSOR` and the shard `SHARD`.
A reader knows the rows from the prompt and the dtype from the model. It takes the width from the
object's length, because only rows x width x item size bytes follow the header. So every byte of an
item's header, too, is known before the header is compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from s3kv.objects.codec import ChunkFormat
from s3kv.objects.headers import Mismatch
from s3kv.objects.integrity import XXH3, Integrity
from s3kv.objects.keys import WHOLE
from s3kv.place import Place
from s3kv.types import ItemShape, TensorSpec, item_bytes

TENSOR = "encoder_output"
GROUP = 0
SHARD = WHOLE
MAX_ITEM_BYTES = 64 * 2**20
"""Length of the largest encoder output that is saved or fetched."""
HEADER_BYTES = 4096
"""Length of every item's header: one tensor's description and the digests of `MAX_ITEM_BYTES` fit
into one page."""


@dataclass(frozen=True, slots=True)
class ItemFormat:
    """Format of one item, as known before the item is fetched. dtype: safetensors name. shape: its
    `nbytes` is the object's length, or the maximum for a fetch."""

    namespace_digest: str
    dtype: str
    shape: ItemShape
    integrity: Integrity = XXH3
    header_bytes: ClassVar = HEADER_BYTES

    @property
    def object_bytes(self) -> int:
        """Length of the object; the length of the memory for it if this is a fetch."""
        return self.shape.nbytes

    def seal(self, place: Place, block_hash: bytes) -> None:
        """Write the header like `ChunkFormat.seal`. Also raises `ValueError` if `shape` is not a
        whole number of rows of equal width."""
        exact = self._exact(self.shape.nbytes)
        if exact is None:
            raise ValueError(f"{self.shape} of {self.dtype}: not the length of such an item")
        exact.seal(place, block_hash)

    def check(self, place: Place, nbytes: int, block_hash: bytes) -> Mismatch | None:
        """Verify the item of `nbytes` in `place` like `ChunkFormat.check`."""
        exact = self._exact(nbytes) if nbytes <= self.shape.nbytes else None
        return "length" if exact is None else exact.check(place, nbytes, block_hash)

    def _exact(self, nbytes: int) -> ChunkFormat | None:
        width = width_of(self.dtype, self.shape.rows, nbytes)
        if width is None:
            return None
        spec = TensorSpec(TENSOR, self.dtype, (self.shape.rows, width))
        exact = ChunkFormat(self.namespace_digest, (spec,), GROUP, SHARD, self.integrity)
        return exact if exact.header_bytes == HEADER_BYTES else None


def width_of(dtype: str, rows: int, nbytes: int) -> int | None:
    """Width of an item with `rows` rows in an object of `nbytes`; None if no width fits."""
    row_bytes = rows * item_bytes(dtype)
    payload_bytes = nbytes - HEADER_BYTES
    if rows < 1 or payload_bytes < row_bytes or payload_bytes % row_bytes:
        return None
    return payload_bytes // row_bytes


@lru_cache(maxsize=1024)
def object_bytes(dtype: str, rows: int, width: int) -> int:
    """Length of the object of an item of this dtype and shape."""
    return HEADER_BYTES + rows * width * item_bytes(dtype)
