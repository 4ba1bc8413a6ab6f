"""Content of a bucket: its namespaces with their manifests and objects."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import click

from s3kv.cli.show import DAY_S, HOUR_S, Report
from s3kv.errors import ConfigError, StoreDenied
from s3kv.objects import keys
from s3kv.objects.manifest import MAX_MANIFEST_BYTES, leaves
from s3kv.stores.store import Inventory, ObjectInfo, read_small
from s3kv.upkeep.listing import chunks, tried

MAX_NAMESPACES = 100_000
"""Most namespaces that are read. A prefix has one for every model, layout and engine version."""
_MOST_NAMED = 5
_REPORT_EVERY = 1000
AGES: Mapping[str, float] = {
    "under 1 h": HOUR_S,
    "1 h to 1 d": DAY_S,
    "1 to 7 d": 7 * DAY_S,
    "7 to 30 d": 30 * DAY_S,
    "over 30 d": float("inf"),
}
"""Age classes, by name: the age in seconds below which an object belongs to the class."""


@dataclass(slots=True)
class NamespaceContent:
    """A namespace: its manifest, and its chunks and items so far as counted.

    manifest: its leaves, as JSON by dotted name; empty unless the namespace's name is the
    manifest's digest. bytes_by_age: for each of `AGES`.
    """

    namespace: keys.Namespace
    manifest: Mapping[str, str] = field(default_factory=dict)
    objects: int = 0
    nbytes: int = 0
    oldest_s: float = float("inf")
    """Last write of the oldest object, seconds since the epoch by the store's clock."""
    newest_s: float = 0.0
    bytes_by_age: dict[str, int] = field(default_factory=lambda: dict.fromkeys(AGES, 0))

    @property
    def model(self) -> str | None:
        """The model that the manifest names."""
        name = self.manifest.get("model.name", self.manifest.get("model"))
        return None if name is None else name.strip('"')

    def add(self, info: ObjectInfo, now_s: float) -> None:
        """Count an object. now_s: seconds since the epoch; later writes count as new."""
        self.objects += 1
        self.nbytes += info.nbytes
        self.oldest_s = min(self.oldest_s, info.modified_s)
        self.newest_s = max(self.newest_s, info.modified_s)
        age_s = now_s - info.modified_s
        name = next(name for name, below_s in AGES.items() if age_s < below_s)
        self.bytes_by_age[name] += info.nbytes


async def namespaces(store: Inventory, prefix: str) -> list[NamespaceContent]:
    """The namespaces under `prefix`, `MAX_NAMESPACES` at most. Raises `StoreError`."""
    return [await describe(store, namespace) for namespace in await _found(store, prefix)]


async def resolve(store: Inventory, prefix: str, start: str) -> keys.Namespace:
    """The one namespace whose name begins with `start`. Raises `ConfigError` if there is none or
    more than one, and `StoreError`."""
    found = await _found(store, prefix)
    fitting = [namespace for namespace in found if start and namespace.digest.startswith(start)]
    if len(fitting) != 1:
        names = [namespace.digest for namespace in fitting or found]
        told = f" of {', '.join(names[:_MOST_NAMED])}" if names else " (none exists)"
        told += f" and {left:,} others" if (left := len(names) - _MOST_NAMED) > 0 else ""
        raise ConfigError(
            f"NAMESPACE is {start!r}, and {len(fitting)} namespaces under {prefix}/ begin with it: "
            f"allowed is the beginning of exactly one{told}"
        )
    return fitting[0]


async def describe(store: Inventory, namespace: keys.Namespace) -> NamespaceContent:
    """A namespace, which may not exist, with its manifest, uncounted. Raises `StoreError`."""
    came = await tried(lambda: read_small(store, namespace.manifest, MAX_MANIFEST_BYTES))
    text = b"" if came is None else came[1]
    is_its_own = hashlib.sha256(text).hexdigest().startswith(namespace.digest)
    return NamespaceContent(namespace, (leaves(text) if is_its_own else None) or {})


async def report_empty(store: Inventory, bucket: str, prefix: str) -> None:
    """Print on stderr that `prefix` holds nothing of s3kv, and name some folders beside it. Raises
    `StoreError`."""
    parent = "".join(prefix.rpartition("/")[:2])
    said = f"s3kv: nothing of s3kv is under {prefix + '/'!r} in {bucket!r}"
    with contextlib.suppress(StoreDenied):  # a policy may allow the prefix alone
        beside = await tried(lambda: store.folders(parent, _MOST_NAMED))
        listed = ", ".join(repr(f"{parent}{n}/") for n in beside if parent + n != prefix)
        said += f"; next to it: {listed or 'nothing'}"
    click.echo(said, err=True)


async def count(
    store: Inventory,
    prefix: str,
    found: Iterable[NamespaceContent],
    now_s: float,
    under: str | None = None,
    on_progress: Report = lambda what, done, total: None,
) -> list[NamespaceContent]:
    """Count the chunks and items of `found`, and of any other namespace that has some. Returns the
    largest first. Raises `StoreError`. under: as for `owned`."""
    counted = {one.namespace: one for one in found}
    objects = 0
    async for address, info in chunks(store, prefix, under):
        namespace = address.namespace
        objects += 1
        if objects % _REPORT_EVERY == 0:
            on_progress("counting", objects, None)
            await asyncio.sleep(0)  # a disk is listed without a pause, and Ctrl-C needs one
        counted.setdefault(namespace, NamespaceContent(namespace)).add(info, now_s)
    return sorted(counted.values(), key=lambda one: (-one.nbytes, one.namespace.digest))


def differing(found: Iterable[NamespaceContent]) -> list[str]:
    """The fields that differ between the manifests of the namespaces that have one."""
    known = [one.manifest for one in found if one.manifest]
    names = sorted({name for manifest in known for name in manifest})
    return [name for name in names if len({manifest.get(name) for manifest in known}) > 1]


async def _found(store: Inventory, prefix: str) -> list[keys.Namespace]:
    found: list[keys.Namespace] = []
    for name in await tried(lambda: store.folders(keys.all_namespaces(prefix), MAX_NAMESPACES)):
        with contextlib.suppress(ValueError):  # a foreign folder
            found.append(keys.Namespace(prefix, name))
    return found
