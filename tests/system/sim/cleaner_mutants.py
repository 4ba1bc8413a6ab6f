"""A cleaner with one thing done wrong: what a fleet that keeps its bucket has to notice."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import AsyncIterator
from typing import Any

from s3kv.io.sources.chain import Chain
from s3kv.messages import JobEnd
from s3kv.objects import keys
from s3kv.objects.keys import ChunkAddress, Namespace
from s3kv.planning.index import BucketIndex
from s3kv.stores.store import ObjectInfo, ObjectStore
from s3kv.types import ChunkKey, Outcome
from s3kv.upkeep import cleaner as cleaning
from s3kv.upkeep import listing, sweep
from s3kv.upkeep.ages import Cut
from s3kv.upkeep.cleaner import Cleaner, Lease
from s3kv.upkeep.refreshing import Refresher
from s3kv.upkeep.sweep import Sweep
from tests.mutants import Mutants, Patch

MUTANTS = Mutants()
mutant, instead_of, swap = MUTANTS.mutant, MUTANTS.instead_of, MUTANTS.swap

survey = Sweep._survey
sweep_once = Cleaner._sweep
fetch = Chain._fetch
read = Cleaner._read
hit = Refresher.hit

swap("waits_for_ever_for_a_holder_that_has_died", cleaning, "LEASE_S", math.inf)
swap("leaves_more_than_the_budget", cleaning, "LEFT", 1.2)
swap("counts_no_use_above", BucketIndex, "use", lambda self, key, now_s: None)


@instead_of(sweep, "owned")
async def takes_every_object_under_the_prefix_for_its_own(
    store: ObjectStore, prefix: str, under: str | None = None, *_: object
) -> AsyncIterator[tuple[Namespace, ChunkAddress | None, ObjectInfo]]:
    mine = Namespace("s3kv", "0" * 32)
    async for info in listing.listed(store, keys.all_namespaces(prefix)):
        if info.key != keys.cleaner(prefix):
            yield mine, ChunkAddress(mine, ChunkKey(0, b""), ""), info


@instead_of(sweep, "owned")
async def lists_the_whole_bucket(
    store: ObjectStore, prefix: str, under: str | None = None, *_: object
) -> AsyncIterator[tuple[Namespace, ChunkAddress | None, ObjectInfo]]:
    async for info in listing.listed(store, ""):
        address = keys.parse(info.key)
        if address is not None:
            yield address.namespace, address, info


@mutant
def deletes_the_young(patch: Patch) -> None:
    spares(patch, math.inf)


@mutant
def deletes_what_is_almost_old(patch: Patch) -> None:
    spares(patch, 1.0)


def spares(patch: Patch, less_s: float) -> None:
    async def careless(self: Sweep) -> Cut:
        self.spare_s += less_s
        return await survey(self)

    patch.setattr(Sweep, "_survey", careless)


@instead_of(Cleaner, "_checkpoint")
async def deletes_by_what_it_listed_before_it_was_stopped(self: Cleaner) -> None:
    pass


@instead_of(Sweep, "_delete_unchanged")
async def does_not_look_before_it_tries_again_to_delete(self: Sweep, objects: Any) -> Any:
    if objects:
        await self.checkpoint()
        return set(await listing.tried(lambda: self.store.delete_many(objects)))
    return set()


@instead_of(Cleaner, "_read")
async def takes_a_lease_that_it_cannot_read_for_a_current_one(
    self: Cleaner,
) -> tuple[ObjectInfo | None, Lease | None]:
    info, lease = await read(self)
    if info is not None and lease is None:
        info = dataclasses.replace(info, age_s=0.0)
    return info, lease


@instead_of(Cleaner, "_sweep")
async def sweeps_once(self: Cleaner) -> None:
    if not self.sweeps:
        await sweep_once(self)
    self._next_sweep_s = math.inf


@instead_of(Refresher, "hit")
def only_looks_at_what_is_used(self: Refresher, info: ObjectInfo) -> float:
    return hit(self, dataclasses.replace(info, age_s=None))


@instead_of(Sweep, "_delete_unchanged")
async def forgets_to_delete(self: Sweep, objects: Any) -> Any:
    return set()


@instead_of(Chain, "_fetch")
async def takes_a_deleted_chunk_for_an_error(self: Chain, job: Any, near: Any) -> JobEnd:
    end = await fetch(self, job, near)
    return job.end(Outcome.FAILED) if end.outcome is Outcome.MISSING else end
