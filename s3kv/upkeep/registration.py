"""The manifest: an object at a namespace's root that spells out its fingerprint.

The namespace's name is a digest of the fingerprint, so engines that differ are in different
namespaces, manifest or not. The manifest is for people: it says what a namespace is, and lets a new
one be compared with its siblings, because one field mostly answers "why does nothing hit?".

Nothing waits for the manifest, and nothing depends on it: a read-only bucket serves as well.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import NamedTuple

from s3kv.errors import StoreDenied, StoreError
from s3kv.objects.keys import Namespace, all_namespaces
from s3kv.objects.manifest import MAX_MANIFEST_BYTES, explain, leaves
from s3kv.place import Place
from s3kv.stores.store import ObjectStore, read_small

_MAX_SIBLINGS = 32
"""Most siblings read: one small object each, once in the life of a namespace."""
_MAX_FIELDS_TOLD = 8


class Registration(NamedTuple):
    """The objects that introduce a namespace.

    manifest: canonical JSON of the fingerprint. shapes: shards of this engine's ranks.
    """

    namespace: Namespace
    manifest: bytes
    shapes: Sequence[str] = ()

    @property
    def keys(self) -> list[str]:
        return [self.namespace.manifest, *map(self.namespace.shape, self.shapes)]


async def introduce(store: ObjectStore, registration: Registration) -> str:
    """Write the manifest and the shapes that are not there. Returns a sentence that names the
    namespace and, for a new one, its differences from its nearest sibling.

    Raises `StoreError` if a request for the manifest fails. A denied write of the manifest is
    mentioned in the sentence. A shape that cannot be written is left out until the next start.
    """
    said = await _introduce(store, registration.namespace, registration.manifest)
    with contextlib.suppress(StoreError):
        for key in registration.keys[1:]:
            await store.put(key, Place.of(b""), if_absent=True)
    return said


async def _introduce(store: ObjectStore, namespace: Namespace, manifest: bytes) -> str:
    held = await _read(store, namespace.manifest)
    if held == manifest:
        return f"namespace {namespace.root} is known, its manifest matches this engine's"
    if held is not None:
        return (
            f"namespace {namespace.root} is known, but its manifest is damaged: the namespace's "
            "name is not its digest. s3kv leaves it alone; nothing depends on it"
        )
    note = ""
    try:
        await store.put(namespace.manifest, Place.of(manifest), if_absent=True)
    except StoreDenied:
        note = " (it has no manifest: writing one was denied)"
    return f"namespace {namespace.root} is new{note}; {await _compare(store, namespace, manifest)}"


async def _compare(store: ObjectStore, namespace: Namespace, manifest: bytes) -> str:
    """A clause on how the namespace differs from the sibling it differs least from."""
    ours = leaves(manifest) or {}
    names = await store.folders(all_namespaces(namespace.prefix), _MAX_SIBLINGS + 1)
    siblings = [name for name in names if name != namespace.digest][:_MAX_SIBLINGS]
    found: list[tuple[int, str, list[str]]] = []
    for name, text in zip(
        siblings,
        await asyncio.gather(*(_read_sibling(store, namespace.prefix, n) for n in siblings)),
        strict=True,
    ):
        theirs = leaves(text or b"")
        if theirs is not None:
            differences = explain(theirs, ours)
            found.append((len(differences), name, differences))
    if not found:
        return f"no other namespace under {namespace.prefix}/ to compare it with"
    count, name, differences = min(found)
    told = "; ".join(differences[:_MAX_FIELDS_TOLD])
    more = f"; and {count - _MAX_FIELDS_TOLD} more" if count > _MAX_FIELDS_TOLD else ""
    others = "the only other" if len(found) == 1 else f"of {len(found)} others the nearest"
    return f"{others}, {name}, differs in {told}{more}"


async def _read_sibling(store: ObjectStore, prefix: str, name: str) -> bytes | None:
    try:
        sibling = Namespace(prefix, name)
    except ValueError:  # a folder somebody else has put there
        return None
    return await _read(store, sibling.manifest)


async def _read(store: ObjectStore, key: str) -> bytes | None:
    came = await read_small(store, key, MAX_MANIFEST_BYTES)
    return came and came[1]
