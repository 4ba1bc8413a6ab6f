"""Shared reads with one thing done wrong: what a fleet of several parallel sizes has to notice."""

from __future__ import annotations

from collections.abc import Coroutine, Iterable
from typing import Any

from s3kv.errors import StoreError
from s3kv.io.sources import other_shards
from s3kv.io.sources.transfer_job import TransferJob
from s3kv.messages import JobEnd
from s3kv.objects import rearranging
from s3kv.types import Outcome
from tests.mutants import Mutants

MUTANTS = Mutants()
instead_of, swap = MUTANTS.instead_of, MUTANTS.swap

init = other_shards.OtherShards.__init__
fetch = other_shards.OtherShards.fetch
runs = rearranging._runs

swap("never_looks_at_what_others_have_stored", other_shards, "covers", lambda wanted, shards: [])


@instead_of(other_shards, "all_of")
async def takes_a_part_for_the_whole(reads: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
    return [end for read in reads if (end := await read) is not None]


@instead_of(rearranging, "_runs")
def takes_every_model_s_pages_for_heads_outermost(
    layers: Any, heads: range, others: Any, other_heads: range, order: str
) -> Iterable[Any]:
    return runs(layers, heads, others, other_heads, "HNC")


@instead_of(other_shards.OtherShards, "__init__")
def believes_the_shards_of_others(
    self: other_shards.OtherShards, handshake: Any, store: Any, fetch: Any, *rest: Any
) -> None:
    async def believed(job: TransferJob) -> JobEnd:
        end: JobEnd = await fetch(job)
        return job.end(Outcome.OK) if end.outcome is Outcome.CORRUPT else end

    init(self, handshake, store, believed, *rest)


@instead_of(other_shards.OtherShards, "fetch")
async def calls_an_outage_a_miss(self: other_shards.OtherShards, job: TransferJob) -> JobEnd | None:
    try:
        return await fetch(self, job)
    except StoreError:
        return None
