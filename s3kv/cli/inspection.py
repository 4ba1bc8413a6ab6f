"""What one object says of itself, and whether that is so."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from s3kv.cli.statistics import TensorStatistics, statistics
from s3kv.config import Config
from s3kv.errors import ConfigError
from s3kv.objects import keys
from s3kv.objects.codec import ChunkFormat, CodecError, Header, Refusal, read_header
from s3kv.objects.integrity import Integrity
from s3kv.objects.store import ObjectStore

MAX_OBJECT_BYTES = 2**30
"""Larger than any chunk; what an object in somebody's bucket may make this process allocate."""


@dataclass(frozen=True, slots=True)
class Inspection:
    """header: None when there is none that can be read. refusal: why the object is not the one its
    key names, None when it is."""

    key: str
    nbytes: int
    header: Header | None
    refusal: Refusal | None
    statistics: list[TensorStatistics] | None = None
    """None when they were not asked for, or the header cannot be read."""


async def inspect(
    store: ObjectStore, config: Config, key: str, *, with_statistics: bool = False
) -> Inspection | None:
    """Read the object and verify it against its key; None when there is no such object.

    Verifies as an engine with these settings would; only the tensors, which an engine knows from
    its model, are taken from the header. Raises `ConfigError` for what is no key of a chunk, and
    when the settings want a secret that is not there; `StoreError` when the bucket cannot be asked.
    """
    address = keys.parse(key)
    if address is None:
        raise ConfigError(
            f"{key!r} is no chunk's key: it looks like "
            f"{config.prefix}/{keys.LAYOUT}/NAMESPACE/HH/HASH/gGROUP-SHARD.safetensors"
        )
    info = await store.head(key)
    if info is None:
        return None
    if info.nbytes > MAX_OBJECT_BYTES:
        return Inspection(key, info.nbytes, None, "length")
    buffer = memoryview(bytearray(info.nbytes))
    came = await store.get_into(key, buffer)
    if came is None:
        return None
    if came.nbytes != info.nbytes:  # replaced between the two requests
        return Inspection(key, came.nbytes, None, "length")
    found = examine(config, address, key, buffer)
    if not with_statistics or found.header is None:
        return found
    return dataclasses.replace(found, statistics=statistics(bytes(buffer)))


def examine(config: Config, address: keys.ChunkAddress, key: str, buffer: memoryview) -> Inspection:
    """Verify the whole object in `buffer`. Raises `ConfigError` as `inspect` does."""
    nbytes = len(buffer)
    integrity = Integrity.of(config)
    try:
        header = read_header(buffer)
        expected = ChunkFormat(
            address.namespace.digest,
            header.tensors,
            address.key.group,
            address.shard,
            integrity,
        )
    except (CodecError, ValueError):
        return Inspection(key, nbytes, None, "header")
    refusal = expected.check(buffer, nbytes, address.key.block_hash)
    return Inspection(key, nbytes, header, refusal)
