"""Chunks that ranks of another size have stored: read, put together, and never wrong."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

from lab import constants
from lab.memory_store import MemoryStore
from s3kv.config import Config
from s3kv.errors import StoreDenied, StoreUnavailable
from s3kv.io import wire
from s3kv.io.sources import chain, other_shards
from s3kv.messages import BucketJob, JobEnd, JobKind
from s3kv.objects import envelope
from s3kv.objects.codec import ChunkFormat
from s3kv.objects.integrity import XXH3, Integrity
from s3kv.objects.rearranging import Pages
from s3kv.objects.shards import Shard
from s3kv.place import Place
from s3kv.stores.store import ObjectInfo, Receiver
from s3kv.types import ChunkKey, Outcome, TensorSpec
from s3kv.upkeep.refreshing import LOOK_S
from tests.unit.io import compressed, rig
from tests.unit.io.rig import NAMESPACE, Worker

HEADS, LAYERS, BLOCKS, TOKENS, CONTENT = 4, 2, 2, 32, 16
PAGES = Pages("HNC")
WHOLE = Shard(range(HEADS), HEADS, range(LAYERS), LAYERS)
HALVES = [Shard(range(at, at + 2), HEADS, range(LAYERS), LAYERS) for at in (0, 2)]
QUARTERS = [Shard(range(at, at + 1), HEADS, range(LAYERS), LAYERS) for at in range(HEADS)]
BLOCK_HASH = bytes(range(32))
OTHER_HASH = bytes(range(1, 33))
UNTOUCHED = 0x5A


def form(shard: Shard, integrity: Integrity = XXH3, order: str = "HNC") -> ChunkFormat:
    heads = len(shard.heads)
    sizes = {"H": heads, "N": TOKENS, "C": CONTENT}
    order = "HNC" if heads == 1 else order
    page = tuple(sizes[dimension] for dimension in order)
    layers = tuple(TensorSpec(f"layers.{n}", "BF16", page, (), order) for n in range(LAYERS))
    part = TensorSpec.of_layers("g0", BLOCKS, layers)
    return ChunkFormat(NAMESPACE.digest, (part,), 0, shard.name, integrity)


def stored(
    shard: Shard,
    *,
    block_hash: bytes = BLOCK_HASH,
    integrity: Integrity = XXH3,
    order: str = "HNC",
    seed: int = 0,
    shrunk: bool = False,
) -> bytes:
    """What a rank with this shard stored, compressed if asked. A byte says layer, head, place."""
    chunk = form(shard, integrity, order)
    data = bytearray(chunk.header_bytes)
    page = TOKENS * CONTENT * 2
    for block in range(BLOCKS):
        for layer in range(LAYERS):
            for head in shard.heads:
                first = seed + 64 * block + 16 * layer + head
                data += bytes((first + 4 * place) % 251 for place in range(page))
    if shrunk:
        return compressed.stored(data[chunk.header_bytes :], block_hash=block_hash, form=chunk)
    chunk.seal(Place.of(data, chunk.header_bytes), block_hash)
    return bytes(data)


def key(shard: Shard, block_hash: bytes = BLOCK_HASH) -> str:
    return NAMESPACE.chunk(ChunkKey(0, block_hash), shard.name)


class Bucket(MemoryStore):
    """Counts reads, by shard also the most at once. failures: of each key, the next answers.
    gates: reads of these shards wait for them. waits: one does."""

    def __init__(self) -> None:
        super().__init__()
        self.running: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self.reads: Counter[str] = Counter()
        self.failures: dict[str, list[Exception]] = {}
        self.gates = {HALVES[0].name: asyncio.Event()}
        self.gates[HALVES[0].name].set()
        self.waits = asyncio.Event()

    async def store(self, *shards: Shard, marked: bool = True, **kind: Any) -> None:
        for shard in shards:
            await self.put(key(shard), Place.of(stored(shard, **kind)), if_absent=False)
            if marked:
                await self.mark(shard)

    async def mark(self, shard: Shard) -> None:
        await self.put(NAMESPACE.shape(shard.name), Place.of(b""), if_absent=True)

    async def get_into(
        self, key: str, place: Place, receiver: Receiver | None = None, first: int | None = None
    ) -> ObjectInfo | None:
        shard = key.partition("/g0-")[2].removesuffix(".safetensors")
        self.reads[key] += 1
        self.running[shard] += 1
        self.most |= self.running
        try:
            if shard in self.gates and not self.gates[shard].is_set():
                self.waits.set()
                await self.gates[shard].wait()
            if self.failures.get(key):
                raise self.failures[key].pop(0)
            return await super().get_into(key, place, receiver, first)
        finally:
            self.running[shard] -= 1


class Reader:
    """The worker of a rank that shares."""

    def __init__(self, worker: Worker, shard: Shard, integrity: Integrity) -> None:
        self.worker = worker
        self._form = form(shard, integrity)

    def slot(self, number: int) -> memoryview:
        nbytes = self._form.object_bytes
        return self.worker.slab.view[number * nbytes : (number + 1) * nbytes]

    def ask(self, number: int = 0, block_hash: bytes = BLOCK_HASH) -> None:
        slot = self.slot(number)
        slot[:] = bytes([UNTOUCHED]) * len(slot)
        self.worker.say(BucketJob(number, JobKind.FETCH, ChunkKey(0, block_hash), number))

    async def fetch(self, number: int = 0, block_hash: bytes = BLOCK_HASH) -> JobEnd:
        self.ask(number, block_hash)
        return (await self.worker.done(1))[number]

    def is_untouched(self, number: int = 0) -> bool:
        return set(bytes(self.slot(number))) == {UNTOUCHED}


@contextlib.asynccontextmanager
async def reading(
    bucket: Bucket,
    shard: Shard,
    *,
    pages: Pages | None = PAGES,
    integrity: Integrity = XXH3,
    **settings: Any,
) -> AsyncIterator[Reader]:
    settings, others = constants.split(settings)
    handshake = wire.Handshake(
        Config(bucket="bkt", **settings),
        NAMESPACE.prefix,
        NAMESPACE.digest,
        shard.name,
        {0: form(shard, integrity).tensors},
        slot_bytes=form(shard, integrity).object_bytes,
        integrity=integrity,
        pages=pages,
    )
    async with rig.serving(
        bucket, greeting=handshake, slab_bytes=64 * form(WHOLE).object_bytes, **others
    ) as (worker, _):
        yield Reader(worker, shard, integrity)
        assert (await worker.settled()).running == 0, "a place has not been given back"


SIZES = [
    (WHOLE, HALVES),
    (WHOLE, QUARTERS),
    (HALVES[1], [WHOLE]),
    (HALVES[1], QUARTERS[2:]),
    (QUARTERS[3], [WHOLE]),
    (QUARTERS[3], HALVES[1:]),
]


@pytest.mark.parametrize("range_bytes", [0, 4096])
@pytest.mark.parametrize(("shard", "others"), SIZES)
@pytest.mark.parametrize("shrunk", [False, True], ids=["plain", "compressed"])
async def test_it_is_put_together_of_what_others_have_stored(
    bucket: Bucket,
    shard: Shard,
    others: list[Shard],
    range_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
    *,
    shrunk: bool,
) -> None:
    monkeypatch.setattr(envelope, "LEAST_PAYLOAD_BYTES", 0)
    await bucket.store(*others, shrunk=shrunk)
    for name in ("whole", "h0-9of4-l0-1of2", "zz", "h0-0of9-l0-0of1"):  # no shards of this
        await bucket.put(f"{NAMESPACE.shapes}{name}", Place.of(b""), if_absent=False)
    async with reading(bucket, shard, range_bytes=range_bytes) as reader:
        for number in range(2):
            end = await reader.fetch(number)
            assert end.outcome is Outcome.OK
            assert end.source == "other_shards"
            assert end.fresh_s <= LOOK_S, "the bucket has to hear of uses"
            assert end.nbytes == sum(len(stored(other)) for other in others)
            assert bytes(reader.slot(number)) == stored(shard)


@pytest.mark.parametrize(
    ("held", "pages", "outcome"),
    [((WHOLE, *HALVES), PAGES, Outcome.OK), ((WHOLE,), None, Outcome.MISSING)],
    ids=["its own is there", "it does not share"],
)
async def test_its_own_object_comes_first(
    bucket: Bucket, held: tuple[Shard, ...], pages: Pages | None, outcome: Outcome
) -> None:
    await bucket.store(*held)
    async with reading(bucket, HALVES[0], pages=pages) as reader:
        assert (await reader.fetch()).outcome is outcome
    assert bucket.reads == {key(HALVES[0]): 1}
    assert bucket.asked["list"] == 0


async def test_where_all_ranks_are_of_one_size_a_miss_costs_no_second_request(
    bucket: Bucket,
) -> None:
    """Only one listing, however many chunks are asked for at once."""
    for half in HALVES:
        await bucket.mark(half)
    async with reading(bucket, HALVES[0]) as reader:
        for number in range(8):
            reader.ask(number, bytes([number]) * 32)
        assert {end.outcome for end in (await reader.worker.done(8)).values()} == {Outcome.MISSING}
        assert all(reader.is_untouched(number) for number in range(8))
    assert sum(bucket.reads.values()) == 8
    assert bucket.asked["list"] == 1


async def test_what_is_there_in_part_is_a_miss(bucket: Bucket) -> None:
    await bucket.store(HALVES[0])
    await bucket.mark(HALVES[1])
    async with reading(bucket, WHOLE) as reader:
        assert (await reader.fetch()).outcome is Outcome.MISSING
        assert reader.is_untouched()


async def test_one_shape_lacks_it_and_another_has_it(bucket: Bucket) -> None:
    await bucket.mark(WHOLE)
    await bucket.store(*QUARTERS)
    async with reading(bucket, HALVES[0]) as reader:
        assert (await reader.fetch()).outcome is Outcome.OK
        assert bytes(reader.slot(0)) == stored(HALVES[0])
    assert bucket.reads == dict.fromkeys(map(key, (HALVES[0], WHOLE, *QUARTERS[:2])), 1)


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(lambda good: good[:-1] + bytes([good[-1] ^ 1]), id="damaged"),
        pytest.param(lambda good: good[:-1], id="short"),
        pytest.param(lambda good: stored(HALVES[1], block_hash=OTHER_HASH), id="another chunk"),
        pytest.param(lambda good: stored(HALVES[0]), id="another shard"),
        pytest.param(lambda good: stored(HALVES[1], order="NHC"), id="another order"),
        pytest.param(lambda good: good.replace(b"BF16", b"F16 "), id="another dtype"),
        pytest.param(lambda good: b"", id="empty"),
    ],
)
async def test_a_bad_shard_is_a_miss_and_stays_where_it_is(bucket: Bucket, bad: Any) -> None:
    await bucket.store(*HALVES)
    await bucket.put(key(HALVES[1]), Place.of(bad(stored(HALVES[1]))), if_absent=False)
    async with reading(bucket, WHOLE) as reader:
        for _ in range(3):
            assert (await reader.fetch()).outcome is Outcome.MISSING
            assert reader.is_untouched()
    assert bucket.reads[key(HALVES[1])] == 1, "what is in quarantine has been read"
    assert await bucket.head(key(HALVES[1])) is not None


async def test_many_bad_shards_are_logged_once_a_minute(
    bucket: Bucket, caplog: pytest.LogCaptureFixture
) -> None:
    """One bad host may write all of them, and every host of another size reads them."""
    await bucket.mark(WHOLE)
    async with reading(bucket, QUARTERS[0]) as reader:
        for number in range(4):
            block_hash = bytes([number]) * 32
            damaged = Place.of(stored(WHOLE, block_hash=block_hash)[:-1] + b"?")
            await bucket.put(key(WHOLE, block_hash), damaged, if_absent=False)
            assert (await reader.fetch(block_hash=block_hash)).outcome is Outcome.MISSING
    assert caplog.text.count("a shard of another shape is not used") == 1


async def test_with_a_key_a_shard_of_another_chunk_is_refused(bucket: Bucket) -> None:
    """Also one sealed with another key."""
    keyed = Integrity("blake3-keyed", b"k" * 32)
    async with reading(bucket, QUARTERS[0], integrity=keyed) as reader:
        await bucket.store(WHOLE, integrity=keyed)
        assert (await reader.fetch()).outcome is Outcome.OK
        assert bytes(reader.slot(0)) == stored(QUARTERS[0], integrity=keyed)
        forged = stored(WHOLE, integrity=Integrity("blake3-keyed", b"x" * 32))
        await bucket.put(key(WHOLE), Place.of(forged), if_absent=False)
        assert (await reader.fetch()).outcome is Outcome.MISSING
        await bucket.put(
            key(WHOLE, OTHER_HASH), Place.of(stored(WHOLE, integrity=keyed)), if_absent=False
        )
        assert (await reader.fetch(block_hash=OTHER_HASH)).outcome is Outcome.MISSING
        assert reader.is_untouched()


async def test_an_outage_is_a_failure_and_no_miss(bucket: Bucket) -> None:
    await bucket.store(*HALVES)
    bucket.failures[key(HALVES[1])] = [StoreUnavailable("down") for _ in range(3)]
    async with reading(bucket, WHOLE, max_attempts=3) as reader:
        assert (await reader.fetch()).outcome is Outcome.FAILED
        assert reader.is_untouched()
        assert (await reader.fetch()).outcome is Outcome.OK


async def test_shapes_that_cannot_be_listed_are_none_for_a_while(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bucket.store(*HALVES)
    bucket.errors["list"] = [StoreDenied("no"), StoreUnavailable("down")]
    monkeypatch.setattr(other_shards, "LOOK_AFTER_ERROR_S", 0.0)
    async with reading(bucket, WHOLE) as reader:
        assert (await reader.fetch()).outcome is Outcome.MISSING
        assert (await reader.fetch()).outcome is Outcome.MISSING
        assert (await reader.fetch()).outcome is Outcome.OK


async def test_a_fleet_that_begins_later_is_noticed(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with reading(bucket, WHOLE) as reader:
        assert (await reader.fetch()).outcome is Outcome.MISSING
        await bucket.store(*HALVES)
        assert (await reader.fetch()).outcome is Outcome.MISSING
    monkeypatch.setattr(other_shards, "LOOK_AGAIN_S", 0.0)
    async with reading(bucket, QUARTERS[0]) as reader:
        assert (await reader.fetch()).outcome is Outcome.OK
        assert (await reader.fetch(block_hash=OTHER_HASH)).outcome is Outcome.MISSING
        await bucket.mark(WHOLE)
        assert (await reader.fetch(block_hash=OTHER_HASH)).outcome is Outcome.MISSING
    assert bucket.reads[key(WHOLE, OTHER_HASH)] == 1


async def test_names_of_no_shards_are_read_up_to_a_number(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(other_shards, "_MOST_SHAPES", 4)
    for number in range(4):
        await bucket.put(f"{NAMESPACE.shapes}a{number}", Place.of(b""), if_absent=False)
    await bucket.store(*HALVES)
    async with reading(bucket, WHOLE) as reader:
        assert (await reader.fetch()).outcome is Outcome.MISSING


async def test_a_cancelled_read_leaves_the_slot_alone(bucket: Bucket) -> None:
    await bucket.store(*HALVES)
    async with reading(bucket, WHOLE) as reader:
        assert (await reader.fetch(1, OTHER_HASH)).outcome is Outcome.MISSING  # shapes are known
        bucket.gates[HALVES[0].name].clear()
        reader.ask()
        await asyncio.wait_for(bucket.waits.wait(), 30)
        reader.worker.say(wire.Cancel(0))
        assert (await reader.worker.done(1))[0].outcome is Outcome.CANCELLED
        assert not bucket.running.total()
        assert reader.is_untouched()
        bucket.gates[HALVES[0].name].set()
        assert (await reader.fetch()).outcome is Outcome.OK


async def test_few_are_put_together_at_once(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes memory beside the slab; the others wait."""
    monkeypatch.setattr(chain, "MOST_STAGED_BYTES", 4 * sum(len(stored(half)) for half in HALVES))
    await bucket.store(*HALVES)
    hashes = [bytes([n]) * 32 for n in range(12)]
    for block_hash in hashes:
        for half in HALVES:
            data = stored(half, block_hash=block_hash)
            await bucket.put(key(half, block_hash), Place.of(data), if_absent=False)
    async with reading(bucket, WHOLE) as reader:
        bucket.gates[HALVES[0].name].clear()
        for number, block_hash in enumerate(hashes):
            reader.ask(number, block_hash)
        while bucket.running[HALVES[0].name] < 4:
            await reader.worker.settled()
        for _ in range(50):  # so that a fifth would have begun
            await reader.worker.settled()
        bucket.gates[HALVES[0].name].set()
        ends = await reader.worker.done(len(hashes))
        assert {end.outcome for end in ends.values()} == {Outcome.OK}
        for number, block_hash in enumerate(hashes):
            assert bytes(reader.slot(number)) == stored(WHOLE, block_hash=block_hash)
    assert bucket.most[HALVES[0].name] == 4
