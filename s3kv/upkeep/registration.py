"""The manifest: an object at a namespace's root that spells out its fingerprint.

The namespace's name is a digest of the fingerprint, so engines that differ are in different
namespaces, with or without a manifest. The manifest is for people: it describes a namespace, and
lets `s3kv ls --summary` compare it with others. Usually one field answers "why does nothing hit?".

Nothing waits for or depends on the manifest: a read-only bucket serves as well.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import NamedTuple

from s3kv.errors import StoreDenied, StoreError
from s3kv.objects.keys import Namespace
from s3kv.objects.manifest import MAX_MANIFEST_BYTES
from s3kv.place import Place
from s3kv.stores.store import ObjectStore, read_small


class Registration(NamedTuple):
    """The objects that register a namespace.

    manifest: canonical JSON of the fingerprint. shapes: shards of this engine's ranks.
    """

    namespace: Namespace
    manifest: bytes
    shapes: Sequence[str] = ()

    @property
    def keys(self) -> list[str]:
        return [self.namespace.manifest, *map(self.namespace.shape, self.shapes)]


async def introduce(store: ObjectStore, registration: Registration) -> str:
    """Write the manifest and the shapes that are missing. Returns a sentence that names the
    namespace and states whether it is new.

    Raises `StoreError` if a request for the manifest fails, but a denied write is only mentioned in
    the sentence. A shape that cannot be written is left out until the next start.
    """
    said = await _introduce(store, registration.namespace, registration.manifest)
    with contextlib.suppress(StoreError):
        for key in registration.keys[1:]:
            await store.put(key, Place.of(b""), if_absent=True)
    return said


async def _introduce(store: ObjectStore, namespace: Namespace, manifest: bytes) -> str:
    came = await read_small(store, namespace.manifest, MAX_MANIFEST_BYTES)
    if came is not None and came[1] == manifest:
        return f"namespace {namespace.root} is known, its manifest matches this engine's"
    if came is not None:
        return (
            f"namespace {namespace.root} is known, but its manifest is damaged: the namespace's "
            "name is not its digest. s3kv leaves it alone; nothing depends on it"
        )
    note = ""
    try:
        await store.put(namespace.manifest, Place.of(manifest), if_absent=True)
    except StoreDenied:
        note = " (it has no manifest: writing one was denied)"
    return (
        f"namespace {namespace.root} is new{note}; if others are under {namespace.prefix}/, "
        "`s3kv ls --summary` shows the fields in which they differ"
    )
