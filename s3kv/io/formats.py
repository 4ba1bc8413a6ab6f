"""Object formats of one worker, and the check that a job can be carried out.

Only the I/O process checks jobs. It accesses the slab, and it looks up the format that the check
needs anyway. Its worker is an engine: an error raised there would reach a vLLM hook, and leave a
job that the planner waits for. A rejected job ends instead, as INVALID. Pure.
"""

from __future__ import annotations

from s3kv.io.wire import Handshake
from s3kv.messages import BucketJob, JobKind
from s3kv.objects.codec import ChunkFormat
from s3kv.objects.item_format import HEADER_BYTES, ItemFormat, width_of
from s3kv.types import ItemShape

Format = ChunkFormat | ItemFormat


def chunk_formats(handshake: Handshake) -> dict[int, ChunkFormat]:
    """The format of the chunks of each group that `handshake` names."""
    return {
        group: ChunkFormat(
            handshake.namespace_digest,
            tensors,
            group,
            handshake.shard,
            handshake.integrity,
            handshake.first_blocks.get(group, 0),
        )
        for group, tensors in handshake.groups.items()
    }


class Formats:
    """Formats of the worker that sends `handshake` and whose slab has `slab_bytes`."""

    def __init__(self, handshake: Handshake, slab_bytes: int) -> None:
        self._handshake = handshake
        self._slab_bytes = slab_bytes
        self._chunks = chunk_formats(handshake)

    def of(self, job: BucketJob) -> tuple[Format, slice]:
        """The format of the object that a fetch or an upload moves, and its bytes in the slab; in
        borrowed memory, only its payload.

        Raises `ValueError` for a job that cannot be carried out: another kind, a group or an item
        this worker does not have, or bytes outside the slab.
        """
        if job.kind is JobKind.SAVE:
            raise ValueError("a save copies to the slab, and not in the I/O process")
        layout = self._chunk(job) if job.item is None else self._item(job, job.item)
        start = job.slot * self._handshake.slot_bytes
        end = start + layout.object_bytes
        if self._handshake.is_borrowed:
            end -= layout.header_bytes
        if not 0 <= start < end <= self._slab_bytes:
            raise ValueError(f"bytes {start} to {end} are outside the slab")
        return layout, slice(start, end)

    def _chunk(self, job: BucketJob) -> ChunkFormat:
        layout = self._chunks.get(job.key.group)
        if layout is None:
            raise ValueError(f"group {job.key.group} is not one of {sorted(self._chunks)}")
        return layout

    def _item(self, job: BucketJob, shape: ItemShape) -> ItemFormat:
        handshake = self._handshake
        if handshake.item_dtype is None:
            raise ValueError(f"{shape}: this worker moves chunks, not items")
        if shape.rows < 1 or shape.nbytes <= HEADER_BYTES:
            raise ValueError(f"{shape}: not the size of an item")
        is_upload = job.kind is JobKind.UPLOAD
        if is_upload and width_of(handshake.item_dtype, shape.rows, shape.nbytes) is None:
            raise ValueError(f"{shape} of {handshake.item_dtype}: not the length of such an item")
        return ItemFormat(
            handshake.namespace_digest, handshake.item_dtype, shape, handshake.integrity
        )
