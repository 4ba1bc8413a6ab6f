"""Which namespaces there are, and what their manifests say."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from s3kv.cli.patience import tried
from s3kv.errors import ConfigError
from s3kv.io.manifest import MAX_MANIFEST_BYTES, leaves
from s3kv.objects import keys
from s3kv.objects.store import ObjectStore

MAX_NAMESPACES = 1000
"""What one request tells. A prefix has one for every model, layout and version of its engines."""


@dataclass(frozen=True, slots=True)
class Entry:
    """fields: the leaves of the manifest, as JSON by dotted name; empty without one that is what
    the namespace's name is a digest of."""

    namespace: keys.Namespace
    fields: Mapping[str, str]

    @property
    def model(self) -> str | None:
        name = self.fields.get("model.name", self.fields.get("model"))
        return None if name is None else name.strip('"')


async def entries(store: ObjectStore, prefix: str) -> list[Entry]:
    """Every namespace under `prefix`, `MAX_NAMESPACES` at most. Raises `StoreError`."""
    names = await tried(lambda: store.folders(keys.all_namespaces(prefix), MAX_NAMESPACES))
    found: list[Entry] = []
    for name in names:
        try:
            namespace = keys.Namespace(prefix, name)
        except ValueError:  # a folder somebody else has put there
            continue
        found.append(await entry(store, namespace))
    return found


async def entry(store: ObjectStore, namespace: keys.Namespace) -> Entry:
    """One namespace, which need not exist. Raises `StoreError`."""
    buffer = memoryview(bytearray(MAX_MANIFEST_BYTES))
    info = await tried(lambda: store.get_into(namespace.manifest, buffer))
    if info is None or info.nbytes > MAX_MANIFEST_BYTES:
        return Entry(namespace, {})
    text = bytes(buffer[: info.nbytes])
    if not hashlib.sha256(text).hexdigest().startswith(namespace.digest):
        return Entry(namespace, {})
    return Entry(namespace, leaves(text) or {})


def differing(found: Sequence[Entry]) -> list[str]:
    """The fields that are not the same in all namespaces which have a manifest."""
    known = [one.fields for one in found if one.fields]
    names = sorted({name for fields in known for name in fields})
    return [name for name in names if len({fields.get(name) for fields in known}) > 1]


async def resolve(store: ObjectStore, prefix: str, start: str) -> keys.Namespace:
    """The one namespace whose name begins with `start`. Raises `ConfigError` when there is none, or
    more than one, and `StoreError`."""
    names = await tried(lambda: store.folders(keys.all_namespaces(prefix), MAX_NAMESPACES))
    fitting = [name for name in names if name.startswith(start)]
    if len(fitting) != 1:
        told = ", ".join(fitting or names) or "none at all"
        raise ConfigError(
            f"{len(fitting)} namespaces under {prefix}/ begin with {start!r}; there are: {told}"
        )
    try:
        return keys.Namespace(prefix, fitting[0])
    except ValueError as error:
        raise ConfigError(f"{fitting[0]!r} is no namespace: {error}") from error
