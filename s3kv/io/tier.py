"""Tier: the host memory of one process, and the I/O process between it and the bucket.

It is set up in the same order for a rank, for an encoder cache and for the library:

    integrity ──▶ namespace ──▶ handshake ──▶ slab ──▶ I/O process started ──▶ bucket tried
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from s3kv.config import Config
from s3kv.errors import ConfigError
from s3kv.host.limits import Plan
from s3kv.host.placement import FIRST_TOUCH, NodeChoice
from s3kv.host.room import PAGE_BYTES, order_of
from s3kv.host.slab import Slab
from s3kv.io.client import IoClient
from s3kv.io.formats import chunk_formats
from s3kv.io.wire import START_TIMEOUT_S, Handshake
from s3kv.objects.codec import ChunkFormat
from s3kv.objects.integrity import Integrity
from s3kv.objects.keys import Namespace, canonical_json, fingerprint_digest
from s3kv.objects.rearranging import Pages
from s3kv.types import TensorSpec

logger = logging.getLogger("s3kv")

_PROCESS_START_S = 130.0
"""Time before `START_TIMEOUT_S` begins: to start an I/O process (90 s on a busy machine), read keys
(`kms.ANSWER_S`) and open the disk (`disk.PATIENCE_S`). The process fails first, with a reason."""


def introduce(
    config: Config,
    identity: Mapping[str, Any],
    shard: str,
    groups: Mapping[int, tuple[TensorSpec, ...]] | None = None,
    *,
    item_dtype: str | None = None,
    writes_manifest: bool = True,
    shapes: Collection[str] = (),
    first_blocks: Mapping[int, int] | None = None,
    pages: Pages | None = None,
    row_bytes: int = 0,
) -> Handshake:
    """The handshake of a process whose objects have this identity.

    identity: everything that changes the bytes of an object or their meaning. The mode and key that
        seal it are added here. shard, groups, item_dtype, first_blocks, pages: as in `Handshake`.
    writes_manifest: whether this process writes the namespace's manifest and compares it, and lists
        `shapes` (the shards of all ranks) in the namespace.
    row_bytes: distance between payloads in borrowed memory; 0: the slab is the process's own.
    Raises `ConfigError` if the mode needs a secret or a package that is missing, and `TypeError`
    or `ValueError` for an identity that is not made of JSON values.
    """
    integrity = Integrity.of(config)
    fingerprint = {**identity, "integrity": integrity.identity()}
    place = Namespace(config.prefix, fingerprint_digest(fingerprint))
    handshake = Handshake(
        config,
        place.prefix,
        place.digest,
        shard,
        dict(groups or {}),
        item_dtype=item_dtype,
        integrity=integrity,
        manifest=canonical_json(fingerprint) if writes_manifest else b"",
        shapes=tuple(shapes) if writes_manifest else (),
        first_blocks=dict(first_blocks or {}),
        pages=pages,
        slot_bytes=row_bytes or PAGE_BYTES,
        is_borrowed=row_bytes > 0,
    )
    if row_bytes:
        return handshake
    formats = chunk_formats(handshake).values()
    slot_bytes = _whole_pages(formats) if len(formats) == 1 else PAGE_BYTES
    return msgspec.structs.replace(handshake, slot_bytes=slot_bytes)


def _whole_pages(formats: Collection[ChunkFormat]) -> int:
    """Size of the largest object of these formats, rounded up to pages."""
    return max(-(-chunk.object_bytes // PAGE_BYTES) for chunk in formats) * PAGE_BYTES


@dataclass(frozen=True, slots=True)
class Slots:
    """Division of a slab into equal slots. If all chunks are of one group, a slot holds one chunk;
    otherwise it is a page, and a chunk takes several. All ranks thus divide their slabs alike.

    formats: object formats, by group. slot_bytes: as in `Handshake`.
    """

    formats: Mapping[int, ChunkFormat]
    slot_bytes: int
    count: int

    @classmethod
    def of(cls, handshake: Handshake, advice: str = "") -> Slots:
        """The slots that `host_bytes` has room for. Raises `ConfigError`, which ends with
        `advice`, if not even one object fits."""
        formats = chunk_formats(handshake)
        slot_bytes, host_bytes = handshake.slot_bytes, handshake.config.host_bytes
        slots = -(-_whole_pages(formats.values()) // slot_bytes)
        least_bytes = slot_bytes << order_of(slots)
        if host_bytes < least_bytes:
            raise ConfigError(
                f"host_bytes is {host_bytes}: allowed is {least_bytes} or more, the size of one "
                f"object{advice}"
            )
        return cls(formats, slot_bytes, host_bytes // slot_bytes)

    @property
    def nbytes(self) -> int:
        """The size of the slab."""
        return self.count * self.slot_bytes


@dataclass(frozen=True, slots=True)
class Tier:
    """An open tier. Its opener closes the client before the slab."""

    handshake: Handshake
    slab: Slab
    client: IoClient
    known: bool | None
    """Whether the namespace has objects; None if the bucket does not answer or was not awaited."""

    def close(self) -> None:
        """End the I/O process, which takes up to 2 s, and release the slab. Idempotent."""
        self.client.close()
        self.slab.close()


def try_bucket(client: IoClient) -> bool | None:
    """Wait until the I/O process has tried the bucket, as long as it may take.

    Returns whether the namespace has objects; None if the bucket does not answer. Raises the errors
    of `IoClient.wait_ready`, after which the client is closed.
    """
    ready = client.wait_ready(START_TIMEOUT_S + _PROCESS_START_S)
    if ready.trouble is not None:
        logger.warning("s3kv serves without the bucket for now: %s", ready.message)
        return None
    return ready.known


def open_tier(
    memory: int | Slab,
    handshake: Handshake | Callable[[Slab], Handshake],
    *,
    node: NodeChoice = FIRST_TOUCH,
    processors: Collection[int] | None = None,
    wait: Callable[[IoClient], bool | None] | None = try_bucket,
    planned: Plan = (),
) -> Tier:
    """Make a slab, start its I/O process, and wait until that has tried the bucket.

    memory: the slab's size in bytes, or a slab, which the tier takes over.
    handshake: the handshake, or a function that makes it once the slab exists.
    node: where the memory should be. processors: cores of the I/O process, as in `IoClient`.
    planned: as in `Slab.create`.
    wait: waits for the bucket; None: the caller does so later.
    Blocks. Raises `ConfigError` if there is too little memory, and the errors of `handshake`,
    `IoClient.start` and `wait`. On an error everything is closed.
    """
    if isinstance(memory, Slab):
        slab = memory
    else:
        slab = Slab.create(memory, node=node, huge_pages=True, planned=planned)
    client: IoClient | None = None
    known = None
    try:
        introduced = handshake if isinstance(handshake, Handshake) else handshake(slab)
        client = IoClient(introduced, slab, processors=processors)
        client.start()
        if wait is not None:
            known = wait(client)
    except BaseException:
        if client is not None:
            client.close()
        slab.close()
        raise
    return Tier(introduced, slab, client, known)
