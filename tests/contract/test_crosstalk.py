"""Many kinds of engines on one prefix at once: nobody ever gets another's bytes.

Two models, two dtypes, two tensor-parallel sizes, two chunk sizes and two KV layouts: 32 engines
of 48 ranks, each with the fingerprint that the connector takes of vLLM's own configuration and of
caches in that layout, and an I/O process's loop of its own. vLLM's block hashes know nothing of
all this: the same prompt has the same hashes in all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from lab import models
from lab.memory_store import MemoryStore
from s3kv.config import Config
from s3kv.connectors.kv_shards import shard_names
from s3kv.connectors.kv_translate import geometry
from s3kv.connectors.kv_worker import WorkerSide
from s3kv.device.layout import PageLayout
from s3kv.host.slab import Slab
from s3kv.io import wire
from s3kv.messages import BucketJob, JobKind
from s3kv.objects.codec import ChunkFormat
from s3kv.objects.keys import Namespace, canonical_json, fingerprint_digest
from s3kv.place import Place
from s3kv.types import ChunkKey, Outcome
from tests.contract.configurations import BLOCK_TOKENS, FULL, configured, groups
from tests.unit.device.caches import Shape, build
from tests.unit.io.rig import Worker, served

HASHES = [bytes([n]) * 32 for n in range(3)]
SLOT_BYTES = 16 * 1024
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Rank:
    """One rank of one engine. number: makes its bytes and its place in the slab its own."""

    number: int
    handshake: wire.Handshake

    @property
    def form(self) -> ChunkFormat:
        return ChunkFormat(
            self.handshake.namespace_digest, self.handshake.groups[0], 0, self.handshake.shard
        )

    def key(self, block_hash: bytes) -> str:
        namespace = Namespace(self.handshake.namespace_prefix, self.handshake.namespace_digest)
        return namespace.chunk(ChunkKey(0, block_hash), self.handshake.shard)

    def payload(self, chunk: int) -> bytes:
        size = self.form.payload_bytes
        return random.Random(1000 * self.number + chunk).randbytes(size)

    def slot(self, chunk: int) -> int:
        return self.number * len(HASHES) + chunk

    def view(self, slab: Slab, chunk: int) -> memoryview:
        begin = self.slot(chunk) * SLOT_BYTES + self.form.header_bytes
        return slab.view[begin : begin + self.form.payload_bytes]


def layout_of(order: str, dtype: str, chunk_blocks: int) -> PageLayout:
    shape = Shape(order, layers=1, dtype=DTYPES[dtype], blocks_per_chunk=chunk_blocks)
    return build(shape, "cpu", torch.Generator().manual_seed(0)).layout()


@pytest.fixture(scope="module")
def ranks(directory: Path) -> list[Rank]:
    found: list[Rank] = []
    for seed, dtype in itertools.product((0, 1), DTYPES):
        vllm_config = configured(models.build(directory, models.TINY, seed=seed), dtype=dtype)
        for tp, chunk_tokens, order in itertools.product((1, 2), (256, 512), ("LBNHC", "LBHNC")):
            vllm_config.parallel_config.__dict__["tensor_parallel_size"] = tp
            config = Config(bucket="bkt", chunk_tokens=chunk_tokens)
            cache = groups(replace(FULL, dtype=DTYPES[dtype]))
            sizes = geometry(config, vllm_config, cache)
            layout = layout_of(order, dtype, chunk_tokens // BLOCK_TOKENS)
            identity = WorkerSide(config, vllm_config, cache, sizes)._identity({0: layout})
            for rank in range(tp):
                handshake = wire.Handshake(
                    config,
                    config.prefix,
                    fingerprint_digest(identity),
                    shard_names(vllm_config.model_config, tp, 1)[rank],
                    {0: (layout.part("g0"),)},
                    manifest=canonical_json(identity),
                    slot_bytes=SLOT_BYTES,
                )
                found.append(Rank(len(found), handshake))
    return found


@pytest.fixture
def slab(ranks: list[Rank]) -> Iterator[Slab]:
    assert max(rank.form.object_bytes for rank in ranks) <= SLOT_BYTES
    slab = Slab.create(len(ranks) * len(HASHES) * SLOT_BYTES)
    yield slab
    slab.close()


async def move(rank: Rank, worker: Worker, kind: JobKind) -> set[tuple[Outcome, str]]:
    """One job for each chunk; how they ended, and why."""
    keys = [ChunkKey(0, block_hash) for block_hash in HASHES]
    worker.say(*(BucketJob(n, kind, key, rank.slot(n)) for n, key in enumerate(keys)))
    return {(end.outcome, end.reason) for end in (await worker.done(len(HASHES))).values()}


def test_every_combination_is_a_namespace_of_its_own(ranks: list[Rank]) -> None:
    assert len(ranks) == 48
    assert len({rank.handshake.namespace_digest for rank in ranks}) == 32
    keys = [rank.key(block_hash) for rank in ranks for block_hash in HASHES]
    assert len(set(keys)) == len(keys)


async def test_all_at_once_find_their_own_bytes_and_no_others(
    ranks: list[Rank], slab: Slab
) -> None:
    store = MemoryStore()
    async with contextlib.AsyncExitStack() as stack:
        workers: list[Worker] = []
        for rank in ranks:
            context = served(lambda _: store, slab, greeting=rank.handshake)
            worker, _ = await stack.enter_async_context(context)
            await worker.ready()
            workers.append(worker)
        pairs = list(zip(ranks, workers, strict=True))

        # One after the other saves. Before its own save, nothing is there.
        for rank, worker in pairs:
            assert await move(rank, worker, JobKind.FETCH) == {(Outcome.MISSING, "")}
            for chunk in range(len(HASHES)):
                rank.view(slab, chunk)[:] = rank.payload(chunk)
            assert await move(rank, worker, JobKind.UPLOAD) == {(Outcome.OK, "")}

        for rank, chunk in itertools.product(ranks, range(len(HASHES))):
            rank.view(slab, chunk)[:] = bytes(rank.form.payload_bytes)
        ends = await asyncio.gather(*(move(r, w, JobKind.FETCH) for r, w in pairs))
        assert set.union(*ends) == {(Outcome.OK, "")}
        for rank, chunk in itertools.product(ranks, range(len(HASHES))):
            assert bytes(rank.view(slab, chunk)) == rank.payload(chunk)

        # Somebody moves objects about: their headers name their owners.
        objects = {}
        for rank, block_hash in itertools.product(ranks, HASHES):
            data = memoryview(bytearray(SLOT_BYTES))
            info = await store.get_into(rank.key(block_hash), Place.of(data))
            objects[rank.number, block_hash] = data[: info.nbytes]
        for rank, block_hash in itertools.product(ranks, HASHES):
            moved = objects[(rank.number - 1) % len(ranks), block_hash]
            await store.put(rank.key(block_hash), Place.of(moved), if_absent=False)
        ends = await asyncio.gather(*(move(r, w, JobKind.FETCH) for r, w in pairs))
        assert {outcome for outcome, _ in set.union(*ends)} == {Outcome.CORRUPT}
        reasons = {reason for _, reason in set.union(*ends)}
        assert {"namespace", "shard"} <= reasons <= {"length", "namespace", "shard"}
