"""What a bucket holds, by namespace and age."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from s3kv.cli.catalogue import entry
from s3kv.cli.patience import chunks
from s3kv.objects import keys
from s3kv.objects.store import ObjectInfo, ObjectStore

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S
AGES: tuple[tuple[str, float], ...] = (
    ("under 1 h", HOUR_S),
    ("1 h to 1 d", DAY_S),
    ("1 to 7 d", 7 * DAY_S),
    ("7 to 30 d", 30 * DAY_S),
    ("over 30 d", float("inf")),
)
"""The histogram's classes: a name, and the age in seconds below which an object belongs to it."""


@dataclass(slots=True)
class NamespaceUsage:
    """The chunks of one namespace. Its manifest, and what is no object of s3kv, are not counted.

    model: as the manifest names it; None without a manifest that says it.
    bytes_by_age: one entry for each of `AGES`.
    """

    digest: str
    model: str | None = None
    objects: int = 0
    nbytes: int = 0
    oldest_s: float = float("inf")
    """Last write of the oldest object, seconds since the epoch by the store's clock."""
    newest_s: float = 0.0
    bytes_by_age: list[int] = field(default_factory=lambda: [0] * len(AGES))

    def add(self, info: ObjectInfo, now_s: float) -> None:
        """Count an object. now_s: seconds since the epoch; an object from later counts as new."""
        self.objects += 1
        self.nbytes += info.nbytes
        self.oldest_s = min(self.oldest_s, info.modified_s)
        self.newest_s = max(self.newest_s, info.modified_s)
        age_s = now_s - info.modified_s
        at = next(i for i, (_, below_s) in enumerate(AGES) if age_s < below_s)
        self.bytes_by_age[at] += info.nbytes


def by_age(nbytes: Sequence[int]) -> dict[str, int]:
    """Bytes for each of `AGES`, by their names."""
    return {name: n for (name, _), n in zip(AGES, nbytes, strict=True)}


async def measure(store: ObjectStore, prefix: str, now_s: float) -> list[NamespaceUsage]:
    """Usage of every namespace under `prefix`, the largest first. Raises `StoreError`.

    One listing request for every 1,000 objects, and one GET for every namespace.
    """
    found = await count(store, prefix, now_s)
    for usage in found.values():
        usage.model = (await entry(store, keys.Namespace(prefix, usage.digest))).model
    return sorted(found.values(), key=lambda usage: (-usage.nbytes, usage.digest))


async def count(
    store: ObjectStore, prefix: str, now_s: float, under: str | None = None
) -> dict[str, NamespaceUsage]:
    """Usage by namespace, without models. under: only of keys that start with this."""
    found: dict[str, NamespaceUsage] = {}
    async for address, info in chunks(store, prefix, under):
        digest = address.namespace.digest
        found.setdefault(digest, NamespaceUsage(digest)).add(info, now_s)
    return found
