"""Reading objects back to see whether they are what their keys say.

An object that does not verify is read a second time: what is damaged may have been the reading.
What cannot be judged with the settings at hand (another integrity mode, another secret) is told
apart from what is damaged, because it is sound to the engines it belongs to.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from s3kv.cli import catalogue
from s3kv.cli.inspection import MAX_OBJECT_BYTES, examine
from s3kv.cli.patience import chunks, tried
from s3kv.config import Config
from s3kv.io.manifest import leaves
from s3kv.objects.codec import Refusal
from s3kv.objects.integrity import Integrity
from s3kv.objects.keys import ChunkAddress, Namespace
from s3kv.objects.store import ObjectInfo, ObjectStore

READERS = 8
"""Objects read at once; each holds its whole object in memory."""

Pick = tuple[ChunkAddress, ObjectInfo]


@dataclass(frozen=True, slots=True)
class Damage:
    """refusal: what is wrong with it. deleted: whether it has been."""

    key: str
    refusal: Refusal
    deleted: bool = False


@dataclass(slots=True)
class Verification:
    """What came of it. gone: deleted or replaced since they were listed. misread: right only when
    read a second time. unjudged: objects by namespace whose integrity is not what the settings
    say."""

    checked: int = 0
    nbytes: int = 0
    gone: int = 0
    misread: int = 0
    damaged: list[Damage] = field(default_factory=list)
    unjudged: dict[str, int] = field(default_factory=dict)

    @property
    def is_clean(self) -> bool:
        return not self.damaged and not self.unjudged


async def sample(store: ObjectStore, prefix: str, count: int, rng: random.Random) -> list[Pick]:
    """`count` chunks, each as likely as any other (Vitter's algorithm R), in key order; all when
    there are not so many. Raises `StoreError`."""
    picked: list[Pick] = []
    seen = 0
    async for pick in chunks(store, prefix):
        seen += 1
        if len(picked) < count:
            picked.append(pick)
        elif (place := rng.randrange(seen)) < count:
            picked[place] = pick
    return sorted(picked, key=lambda pick: pick[1].key)


async def in_turn(picks: Sequence[Pick]) -> AsyncIterator[Pick]:
    for pick in picks:
        yield pick


class Verifier:
    """Verifies as an engine with the settings of `config` would. Belongs to one loop.

    delete: remove what is damaged, if it is still what was listed.
    """

    def __init__(
        self,
        store: ObjectStore,
        config: Config,
        *,
        delete: bool = False,
        on_object: Callable[[int], None] = lambda checked: None,
    ) -> None:
        self.found = Verification()
        self._store = store
        self._config = config
        self._delete = delete
        self._on_object = on_object
        self._taking = asyncio.Lock()
        self._judging = asyncio.Lock()
        self._judged: dict[str, bool] = {}

    async def run(self, picks: AsyncIterator[Pick]) -> None:
        """Raises `StoreError`, and `ConfigError` when the settings want a secret there is not."""
        readers = [asyncio.ensure_future(self._read_all(picks)) for _ in range(READERS)]
        try:
            await asyncio.gather(*readers)
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)
        self.found.damaged.sort(key=lambda damage: damage.key)

    async def _read_all(self, picks: AsyncIterator[Pick]) -> None:
        while True:
            async with self._taking:  # an iterator takes one question at a time
                pick = await anext(picks, None)
            if pick is None:
                return
            await self._verify(*pick)
            self._on_object(self.found.checked)

    async def _verify(self, address: ChunkAddress, info: ObjectInfo) -> None:
        if not await self._can_judge(address.namespace):
            self._leave(address)
            return
        refusal = await self._refusal(address, info)
        if refusal not in (None, "gone", "algorithm"):
            refusal = await self._refusal(address, info)
            self.found.misread += refusal is None
        if refusal == "algorithm":
            self._leave(address)
            return
        if refusal == "gone":
            self.found.gone += 1
            return
        self.found.checked += 1
        self.found.nbytes += info.nbytes
        if refusal is not None:
            deleted = self._delete and await tried(
                lambda: self._store.delete(info.key, if_etag=info.etag)
            )
            self.found.damaged.append(Damage(info.key, refusal, deleted))

    def _leave(self, address: ChunkAddress) -> None:
        digest = address.namespace.digest
        self.found.unjudged[digest] = self.found.unjudged.get(digest, 0) + 1

    async def _refusal(
        self, address: ChunkAddress, info: ObjectInfo
    ) -> Refusal | Literal["gone"] | None:
        if info.nbytes > MAX_OBJECT_BYTES:
            return "length"
        buffer = memoryview(bytearray(info.nbytes))
        came = await tried(lambda: self._store.get_into(info.key, buffer))
        if came is None or came.nbytes != info.nbytes:
            return "gone"
        return examine(self._config, address, info.key, buffer).refusal

    async def _can_judge(self, namespace: Namespace) -> bool:
        """Whether the manifest says the integrity that the settings say. Without a manifest, nobody
        can say otherwise, unless a secret is wanted: with a wrong one everything looks forged."""
        async with self._judging:
            if namespace.digest not in self._judged:
                ours = Integrity.of(self._config).identity()
                fields = (await catalogue.entry(self._store, namespace)).fields
                if fields:
                    wanted = leaves(json.dumps({"integrity": ours}).encode()) or {}
                    said = {n: v for n, v in fields.items() if n.startswith("integrity")}
                    self._judged[namespace.digest] = said == wanted
                else:
                    self._judged[namespace.digest] = ours["mode"] != "blake3-keyed"
            return self._judged[namespace.digest]
