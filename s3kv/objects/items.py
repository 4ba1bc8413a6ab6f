"""Items in the object format: objects of one tensor whose length differs from one to the next.

An item is what an encoder made of one image or clip: a tensor [rows, width], one row for each
token it stands for. It is written as a chunk is (`codec`), with the tensor `TENSOR` and the shard
`SHARD`. A reader knows the rows from the prompt and the dtype from the model; the width it takes
from the object's length, since rows x width x item size is all there is behind the header. So of
an item, too, every byte of the header is known before it is compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from s3kv.objects.codec import ChunkFormat, Refusal
from s3kv.objects.integrity import XXH3, Integrity
from s3kv.types import ItemShape, TensorSpec, item_bytes

TENSOR = "encoder_output"
GROUP = 0
SHARD = "encoder"
HEADER_BYTES = 4096
"""The header of every item: one tensor's description never needs a second page."""


@dataclass(frozen=True, slots=True)
class ItemFormat:
    """The format of one item, as far as is known before it is there.

    dtype: safetensors name. shape: for a fetch `nbytes` is how much there may be at most.
    """

    namespace_digest: str
    dtype: str
    shape: ItemShape
    integrity: Integrity = XXH3

    @property
    def object_bytes(self) -> int:
        """Length of the object, or of the place for it."""
        return self.shape.nbytes

    def seal(self, buffer: memoryview, block_hash: bytes) -> None:
        """As `ChunkFormat.seal`; the payload begins at `HEADER_BYTES`. Raises `ValueError` when
        `shape` is no whole number of rows.
        """
        exact = self._exact(self.shape.nbytes)
        if exact is None:
            raise ValueError(f"{self.shape} of {self.dtype}: not the length of such an item")
        exact.seal(buffer, block_hash)

    def check(self, buffer: memoryview, nbytes: int, block_hash: bytes) -> Refusal | None:
        """As `ChunkFormat.check`: None when the first `nbytes` of `buffer` are the item."""
        exact = self._exact(nbytes) if nbytes <= self.shape.nbytes else None
        return "length" if exact is None else exact.check(buffer, nbytes, block_hash)

    def _exact(self, nbytes: int) -> ChunkFormat | None:
        width = width_of(self.dtype, self.shape.rows, nbytes)
        if width is None:
            return None
        spec = TensorSpec(TENSOR, self.dtype, (self.shape.rows, width))
        return ChunkFormat(self.namespace_digest, (spec,), GROUP, SHARD, self.integrity)


def width_of(dtype: str, rows: int, nbytes: int) -> int | None:
    """The width of an item with `rows` rows in an object of `nbytes`; None when there is none."""
    row_bytes = rows * item_bytes(dtype)
    payload_bytes = nbytes - HEADER_BYTES
    if rows < 1 or payload_bytes < row_bytes or payload_bytes % row_bytes:
        return None
    return payload_bytes // row_bytes


@lru_cache(maxsize=1024)
def object_bytes(dtype: str, rows: int, width: int) -> int:
    """Length of the object of such an item."""
    return HEADER_BYTES + rows * width * item_bytes(dtype)
