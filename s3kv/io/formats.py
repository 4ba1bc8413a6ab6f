"""Object formats of one worker, and the check that a job can be carried out.

The client checks a job before it sends it, so that a mistake is an error at the call. The I/O
process checks it again before it touches the slab. Pure.
"""

from __future__ import annotations

from s3kv.io import wire
from s3kv.objects.codec import ChunkFormat
from s3kv.objects.item_format import HEADER_BYTES, ItemFormat, width_of
from s3kv.objects.keys import MAX_HASH_BYTES

Format = ChunkFormat | ItemFormat


def chunk_formats(handshake: wire.Handshake) -> dict[int, ChunkFormat]:
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

    def __init__(self, handshake: wire.Handshake, slab_bytes: int) -> None:
        self._handshake = handshake
        self._slab_bytes = slab_bytes
        self._chunks = chunk_formats(handshake)

    def of(self, job: wire.Transfer) -> Format:
        """The format of the object this job moves.

        Raises `TypeError` or `ValueError` for a job that cannot be carried out: an invalid block
        hash or number, a group or an item this worker does not have, or bytes outside the slab.
        """
        _check_hash(job.block_hash)
        _check_whole("job_id", job.job_id)
        _check_whole("offset", job.offset)
        layout = self._chunk(job) if job.item is None else self._item(job)
        end = job.offset + layout.object_bytes
        if not 0 <= job.offset < end <= self._slab_bytes:
            raise ValueError(f"bytes {job.offset} to {end} are outside the slab")
        return layout

    def _chunk(self, job: wire.Transfer) -> ChunkFormat:
        layout = self._chunks.get(job.group)
        if layout is None:
            raise ValueError(f"group {job.group!r} is none of {sorted(self._chunks)}")
        return layout

    def _item(self, job: wire.Transfer) -> ItemFormat:
        handshake, shape = self._handshake, job.item
        assert shape is not None
        if handshake.item_dtype is None:
            raise ValueError(f"{shape}: this worker moves chunks, not items")
        _check_whole("group", job.group)
        _check_whole("rows", shape.rows)
        _check_whole("nbytes", shape.nbytes)
        if job.group < 0 or shape.rows < 1 or shape.nbytes <= HEADER_BYTES:
            raise ValueError(f"group {job.group}, {shape}: no item is like that")
        if (
            isinstance(job, wire.Upload)
            and width_of(handshake.item_dtype, shape.rows, shape.nbytes) is None
        ):
            raise ValueError(f"{shape} of {handshake.item_dtype}: not the length of such an item")
        return ItemFormat(
            handshake.namespace_digest, handshake.item_dtype, shape, handshake.integrity
        )


def _check_hash(block_hash: object) -> None:
    if not isinstance(block_hash, bytes):
        raise TypeError(f"block hash {block_hash!r} is {type(block_hash).__name__}, not bytes")
    count = len(block_hash)
    if not 1 <= count <= MAX_HASH_BYTES:
        raise ValueError(f"block hash of {count} bytes: allowed are 1 to {MAX_HASH_BYTES}")


def _check_whole(name: str, value: object) -> None:
    if not isinstance(value, int):
        raise TypeError(f"{name} {value!r} is {type(value).__name__}, not int")
