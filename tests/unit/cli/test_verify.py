"""`s3kv verify`."""

from __future__ import annotations

import json
import random
import tracemalloc
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from lab.memory_store import MemoryStore
from s3kv.cli.verify import Verification, Verifier, refusal_of, sample
from s3kv.config import Config
from s3kv.errors import StoreDenied
from s3kv.objects import compression
from s3kv.objects.codec import ChunkFormat
from s3kv.objects.encryption import MasterKey
from s3kv.objects.envelope import Envelope, Segments
from s3kv.objects.integrity import Integrity
from s3kv.objects.keys import ChunkAddress, Namespace, canonical_json, fingerprint_digest
from s3kv.place import Place
from s3kv.stores.store import Receiver
from s3kv.types import ChunkKey, TensorSpec
from s3kv.upkeep import listing
from tests.system.forms import flipped
from tests.unit.cli.conftest import SHARD, Run, block_hash, chunk, left, put

SECRET = "0123456789abcdef-secret"
FINGERPRINT = {"integrity": {"mode": "xxh3"}}
PLACE = Namespace("s3kv", fingerprint_digest(FINGERPRINT))


def key(number: int, place: Namespace = PLACE) -> str:
    return chunk(place, number)


def sealed(number: int, place: Namespace = PLACE, integrity: Integrity | None = None) -> bytes:
    tensors = (TensorSpec("layer", "U8", (200,)),)
    layout = ChunkFormat(place.digest, tensors, 0, SHARD, integrity or Integrity())
    data = bytearray(layout.object_bytes)
    data[layout.header_bytes :] = bytes([number]) * 200
    layout.seal(Place.of(data, layout.header_bytes), block_hash(number))
    return bytes(data)


TEXT = TensorSpec("layer", "BF16", (2**18,))


def compressed(number: int, tensors: tuple[TensorSpec, ...] = (TEXT,)) -> bytes:
    layout = ChunkFormat(PLACE.digest, tensors, 0, SHARD)
    place = Place.of(bytearray(layout.object_bytes), layout.header_bytes)
    place.payload[:] = bytes([number, 1, 2, 3]) * (layout.payload_bytes // 4)
    codec = compression.codec()
    return b"".join(Envelope(layout).encode(place, block_hash(number), codec, lambda: False))


def fill(boto: Any, bad: dict[int, bytes]) -> None:
    put(boto, PLACE.manifest, canonical_json(FINGERPRINT))
    for number in range(20):
        put(boto, key(number), bad.get(number, sealed(number)))
    put(boto, f"{PLACE.root}somebody-elses", b"not ours")


def verified(run: Run, *options: str, code: int = 1) -> Any:
    result = run("verify", "--json", *options)
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def test_sound_objects(run: Run, boto: Any) -> None:
    fill(boto, {})
    found = verified(run, code=0)
    assert (found["checked"], found["damaged"], found["unjudged"]) == (20, [], {})
    assert found["nbytes"] == 20 * len(sealed(0))
    assert "20 objects" in run("verify").stdout


def test_damaged_objects_are_named_and_deleted_when_asked(run: Run, boto: Any) -> None:
    bad = {3: flipped(sealed(3)), 7: b"", 11: sealed(12), 13: sealed(13)[:-1]}
    fill(boto, bad)
    before = left(boto)
    found = verified(run)
    refused = {d["key"]: d["refusal"] for d in found["damaged"]}
    assert refused == {key(3): "digest", key(7): "header", key(11): "block_hash", key(13): "length"}
    assert left(boto) == before
    text = run("verify", "--delete")
    assert text.exit_code == 1
    assert f"digest      {key(3)}  (deleted)" in text.stdout
    assert before - left(boto) == {key(number) for number in bad}
    assert run("verify").exit_code == 0


def test_a_run_that_breaks_off_reports_its_deletions(
    run: Run, boto: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(boto, dict.fromkeys(range(20), b"bad"))
    chunks = listing.chunks

    async def some(*arguments: Any) -> AsyncIterator[Any]:
        async for pick in chunks(*arguments):
            yield pick
        raise StoreDenied("no more")

    monkeypatch.setattr(listing, "chunks", some)
    deleted = {one["key"] for one in verified(run, "--delete", code=3)["damaged"]}
    assert deleted
    assert deleted.isdisjoint(left(boto))


def test_compressed_objects(run: Run, boto: Any) -> None:
    bad = {2: flipped(compressed(2)), 4: compressed(5), 6: compressed(6)[:-1]}
    bad[8] = compressed(8, (TensorSpec("layer", "BF16", (2**12,)),))  # has no compressed form
    fill(boto, {number: compressed(number) for number in range(8)} | bad)
    found = verified(run)
    assert (found["checked"], found["undecoded"]) == (20, 0)
    refused = {d["key"]: d["refusal"] for d in found["damaged"]}
    assert refused == {key(2): "digest", key(4): "block_hash", key(6): "length", key(8): "length"}


def test_without_blosc2_compressed_objects_are_not_called_damaged(
    run: Run, boto: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(boto, {1: compressed(1), 2: compressed(2), 3: compressed(4)})
    before = left(boto)
    monkeypatch.setattr(compression, "codec", lambda: None)
    found = verified(run, "--delete")
    assert (found["checked"], found["undecoded"]) == (18, 2)
    assert {d["key"]: d["refusal"] for d in found["damaged"]} == {key(3): "block_hash"}
    assert before - left(boto) == {key(3)}
    text = run("verify").stdout
    assert "2 compressed objects cannot be judged without blosc2" in text
    assert "→ pip install 'vllm-s3kv[compression]'" in text


def test_encrypted_objects_are_counted_and_left_alone(run: Run, boto: Any) -> None:
    fill(boto, {3: flipped(sealed(3))})
    master = MasterKey(bytes(range(32)))
    for number in range(30, 35):
        address = ChunkAddress(PLACE, ChunkKey(0, block_hash(number)), SHARD)
        put(boto, master.form_of(address).key, b"whatever it is")
    before = left(boto)
    found = verified(run, "--delete")
    assert (found["checked"], found["encrypted"], found["unjudged"]) == (20, 5, {})
    assert {d["key"] for d in found["damaged"]} == before - left(boto) == {key(3)}
    text = run("verify")
    assert text.exit_code == 0, text.output
    assert "5 encrypted objects not read: it takes a prompt to open it" in text.stdout


def test_a_bucket_of_encrypted_objects_is_clean(run: Run, boto: Any) -> None:
    put(boto, PLACE.manifest, canonical_json(FINGERPRINT))
    address = ChunkAddress(PLACE, ChunkKey(0, block_hash(1)), SHARD)
    put(boto, MasterKey(bytes(32)).form_of(address).key, b"")
    result = run("verify")
    assert result.exit_code == 0, result.output
    assert "1 encrypted object not read" in result.stdout
    assert "0 objects (0 B) read" in result.stdout


@pytest.mark.parametrize(("gib", "refusal"), [(16, "length"), (1, "block_hash")])
def test_a_header_cannot_make_it_allocate_what_it_likes(gib: int, refusal: str) -> None:
    tensors = (TensorSpec("layer", "BF16", (gib * 2**29,)),)
    envelope = Envelope(ChunkFormat(PLACE.digest, tensors, 0, SHARD))
    count = len(envelope.segments)
    segments = Segments([1] * count, [b"0" * 16] * count, [b"0" * 32] * count)
    data = envelope.header(block_hash(2), segments) + bytes(count)
    address = ChunkAddress(PLACE, ChunkKey(0, block_hash(1)), SHARD)
    tracemalloc.start()
    assert refusal_of(Config(bucket="bkt"), address, memoryview(data)) == refusal
    assert tracemalloc.get_traced_memory()[1] < 2**25
    tracemalloc.stop()


def test_one_object_and_one_that_is_not_there(run: Run, boto: Any) -> None:
    fill(boto, {3: flipped(sealed(3))})
    for number, code in ((3, 1), (4, 0)):
        assert verified(run, key(number), code=code)["checked"] == 1
    result = run("verify", key(99))
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"that begins with '{key(99)}'; all begin with 's3kv/v3/'" in result.stderr
    assert "begins with 's3kv/?'" in run("verify", "s3kv/\udcff").stderr


@pytest.mark.parametrize(
    ("place", "refusal"),
    [
        (Namespace("s3kv", "b" * 32).chunk(ChunkKey(0, block_hash(1)), SHARD), "namespace"),
        (PLACE.chunk(ChunkKey(1, block_hash(1)), SHARD), "coverage"),
        (PLACE.chunk(ChunkKey(0, block_hash(1)), "h4-7of8-l0-31of32"), "shard"),
    ],
)
def test_a_good_object_in_the_wrong_place(run: Run, boto: Any, place: str, refusal: str) -> None:
    put(boto, place, sealed(1))
    assert json.loads(run("verify", "--json").stdout)["damaged"][0]["refusal"] == refusal


def test_a_sample(run: Run, boto: Any) -> None:
    fill(boto, {number: b"bad" for number in range(0, 20, 2)})
    assert json.loads(run("verify", "--sample", "6", "--json").stdout)["checked"] == 6


async def test_every_object_is_as_likely_to_be_drawn() -> None:
    store = MemoryStore()
    for number in range(10):
        await store.put(key(number), Place.of(b"x"), if_absent=True)
    rng = random.Random(5)
    drawn = dict.fromkeys((key(number) for number in range(10)), 0)
    for _ in range(2000):
        for _, info in await sample(store, "s3kv", 3, rng):
            drawn[info.key] += 1
    assert sum(drawn.values()) == 6000
    assert all(500 < count < 700 for count in drawn.values()), drawn  # 600 ± 4.9 σ


@pytest.mark.parametrize("delete", [(), ("--delete",)])
def test_a_namespace_of_another_secret_is_not_called_damaged(
    run: Run, boto: Any, monkeypatch: pytest.MonkeyPatch, delete: tuple[str, ...]
) -> None:
    monkeypatch.setenv("S3KV_INTEGRITY_SECRET", SECRET)
    keyed = Integrity.of(Config(bucket="bkt", integrity="blake3-keyed"))
    fingerprint = {"integrity": keyed.identity()}
    theirs = Namespace("s3kv", fingerprint_digest(fingerprint))
    put(boto, theirs.manifest, canonical_json(fingerprint))
    put(boto, key(1, theirs), sealed(1, theirs, keyed))
    before = left(boto)

    with_secret = ("--set", "integrity=blake3-keyed", *delete)
    assert verified(run, *with_secret, code=0)["checked"] == 1
    monkeypatch.setenv("S3KV_INTEGRITY_SECRET", SECRET[::-1])
    for options in (with_secret, delete):
        found = verified(run, *options)
        assert (found["checked"], found["unjudged"]) == (0, {theirs.digest: 1})
    assert "cannot be judged" in run("verify").stdout
    assert left(boto) == before


@pytest.mark.parametrize("mode", ["none", "blake3-keyed"])
def test_without_a_manifest_another_mode_is_not_called_damaged(
    run: Run, boto: Any, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setenv("S3KV_INTEGRITY_SECRET", SECRET)
    put(boto, key(1), sealed(1, PLACE, Integrity.of(Config(bucket="bkt", integrity=mode))))
    before = left(boto)
    result = run("verify", "--delete", "--json")
    assert json.loads(result.stdout)["unjudged"] == {PLACE.digest: 1}
    assert left(boto) == before


class Misreading(MemoryStore):
    """The first reading of every object is damaged."""

    def __init__(self) -> None:
        super().__init__()
        self.read: set[str] = set()

    async def get_into(self, key: str, place: Place, receiver: Receiver | None = None) -> Any:
        came = await super().get_into(key, place, receiver)
        if came is not None and key not in self.read:
            place.payload[-1] ^= 1
            self.read.add(key)
        return came


async def test_what_is_right_when_read_again_is_not_damaged() -> None:
    store = Misreading()
    for number in range(5):
        await store.put(key(number), Place.of(sealed(number)), if_absent=True)
    verifier = Verifier(store, Config(bucket="bkt"), Verification(), delete=True)
    picks = await sample(store, "s3kv", 10, random.Random(0))
    await store.delete(key(2))
    gone = next(pick for pick in picks if pick[1].key == key(2))
    picks.append((gone[0], replace(gone[1], nbytes=2**30 + 1)))  # large is not damaged

    async def given() -> Any:
        for pick in picks:
            yield pick

    await verifier.run(given())
    found = verifier.found
    assert (found.checked, found.misread, found.gone, found.damaged) == (4, 4, 2, [])
