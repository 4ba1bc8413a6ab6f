"""A store that encrypts: objects come back through it, and an attacker's come as unreadable."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest

from lab.memory_store import MemoryStore
from s3kv.errors import StoreUnranged
from s3kv.io.sources import encrypted_store as module
from s3kv.io.sources.encrypted_store import EncryptedStore
from s3kv.objects.encryption import HEADER_BYTES, SEGMENT_BYTES, Keyring, encrypted_bytes
from s3kv.place import Place
from tests.unit.io import rig
from tests.unit.stores.suite import Recorder

MASTER, OTHER = bytes(range(32)), bytes(range(1, 33))
LENGTHS = [1, 4096, SEGMENT_BYTES - 1, SEGMENT_BYTES, SEGMENT_BYTES + 1, 3 * SEGMENT_BYTES + 77]


KEY = rig.object_key(1)
DATA = random.Random(1).randbytes(3 * SEGMENT_BYTES + 77)


def apart(nbytes: int, seam: int = 4096, room: int = 0) -> Place:
    """A place whose header and payload do not adjoin."""
    seam = min(seam, nbytes)
    return Place(memoryview(bytearray(seam)), memoryview(bytearray(nbytes - seam + room)))


def held(data: bytes) -> Place:
    place = apart(len(data))
    place.write(data)
    return place


@pytest.fixture
def store(bucket: MemoryStore) -> EncryptedStore:
    return EncryptedStore(bucket, Keyring([MASTER]))


async def read(store: EncryptedStore, nbytes: int, key: str = KEY) -> tuple[int, bytes] | None:
    place = apart(nbytes)
    info = await store.get_into(key, place)
    return None if info is None else (info.nbytes, bytes(place))


@pytest.mark.parametrize("nbytes", LENGTHS)
async def test_an_object_comes_back(
    store: EncryptedStore, bucket: MemoryStore, nbytes: int
) -> None:
    data = DATA[:nbytes]
    assert await read(store, nbytes) is None
    assert await store.head(KEY) is None
    assert await store.put(KEY, held(data), if_absent=True)
    assert not await store.put(KEY, held(data), if_absent=True)
    assert await read(store, nbytes) == (nbytes, data)
    head = await store.head(KEY)
    assert head.nbytes == nbytes
    key, stored = only(bucket)
    assert key != KEY
    assert len(stored) == encrypted_bytes(nbytes)
    assert nbytes < 100 or data[:100] not in stored


def only(bucket: MemoryStore) -> tuple[str, bytes]:
    """The key and the bytes of the one object in a bucket."""
    ((key, (data, _)),) = bucket._objects.items()
    return key, data


@pytest.mark.parametrize("seam", [0, 300, 4096, SEGMENT_BYTES, SEGMENT_BYTES + 5])
async def test_header_and_payload_need_not_adjoin(store: EncryptedStore, seam: int) -> None:
    place = apart(len(DATA), seam)
    place.write(DATA)
    await store.put(KEY, place, if_absent=True)
    assert bytes(place) == DATA
    target = apart(len(DATA), seam, room=500)
    assert await store.get_into(KEY, target) is not None
    assert bytes(target) == DATA + bytes(500)


async def test_a_receiver_learns_lengths_of_the_object_inside(store: EncryptedStore) -> None:
    await store.put(KEY, held(DATA), if_absent=True)
    told = Recorder(apart(len(DATA)))
    await store.get_into(KEY, apart(len(DATA)), told)
    assert told.begun == [len(DATA)]
    assert told.seen
    assert {*map(len, told.seen)} <= {n * SEGMENT_BYTES for n in (1, 2, 3)} | {len(DATA)}
    told.check(DATA)


@pytest.mark.parametrize("room", [1, SEGMENT_BYTES, 2 * SEGMENT_BYTES + 1])
async def test_an_object_that_is_too_long_is_left_unread(store: EncryptedStore, room: int) -> None:
    await store.put(KEY, held(DATA), if_absent=True)
    assert await read(store, room) == (len(DATA), bytes(room))
    told = Recorder(apart(room))
    info = await store.get_into(KEY, apart(len(DATA)), told)
    assert info.nbytes == len(DATA)
    assert not any(bytes(told.memory or b""))


Attack = Callable[[bytes, dict[str, bytes]], bytes]
"""The bytes in the place of an object: made of its bytes, and of others by name."""
_STORED = SEGMENT_BYTES + 28


def _swapped(data: bytes, others: dict[str, bytes]) -> bytes:
    first, second = (
        slice(HEADER_BYTES + n * _STORED, HEADER_BYTES + (n + 1) * _STORED) for n in (0, 1)
    )
    return data[: first.start] + data[second] + data[first] + data[second.stop :]


ATTACKS: dict[str, Attack] = {
    "another object": lambda data, others: others["another object"],
    "another key's": lambda data, others: others["another key's"],
    "plain": lambda data, others: DATA,
    "plain, as long": lambda data, others: DATA.ljust(len(data), b"x"),
    "segments swapped": _swapped,
    "a segment of another object": lambda data, others: (
        data[:-300] + others["another object"][-300:]
    ),
    "the last segment cut off": lambda data, others: data[: HEADER_BYTES + 3 * _STORED],
    "truncated": lambda data, others: data[:-1],
    "a byte more": lambda data, others: data + b"x",
    "empty": lambda data, others: b"",
    "header alone": lambda data, others: data[:HEADER_BYTES],
    "header of another key": lambda data, others: (
        others["another key's"][:HEADER_BYTES] + data[HEADER_BYTES:]
    ),
    "first bit": lambda data, others: bytes([data[0] ^ 1]) + data[1:],
    "last bit": lambda data, others: data[:-1] + bytes([data[-1] ^ 1]),
    "first and last segment of another object": lambda data, others: (
        others["another object"][: HEADER_BYTES + _STORED] + data[HEADER_BYTES + _STORED :]
    ),
}


@pytest.mark.parametrize("attack", ATTACKS)
async def test_an_attack_gives_an_object_that_is_unreadable(
    store: EncryptedStore, bucket: MemoryStore, attack: str
) -> None:
    """Whole, and in ranges: at least one of which is unreadable, or of another length."""
    await store.put(KEY, held(DATA), if_absent=True)
    key, data = only(bucket)
    others = {}
    for name, keyring, other in (
        ("another object", Keyring([MASTER]), rig.object_key(2)),
        ("another key's", Keyring([OTHER]), KEY),
    ):
        elsewhere = MemoryStore()
        await EncryptedStore(elsewhere, keyring).put(other, held(DATA), if_absent=True)
        others[name] = only(elsewhere)[1]
    bucket.hold(key, ATTACKS[attack](data, others))

    found = await read(store, len(DATA))
    assert found[0] != len(DATA)
    lengths = set()
    for begin in range(0, len(DATA), SEGMENT_BYTES):
        place = apart(min(SEGMENT_BYTES, len(DATA) - begin), 0)
        try:
            info = await store.get_into(KEY, place, first=begin)
        except StoreUnranged:
            info = None
        lengths.add(None if info is None else info.nbytes)
    assert lengths != {len(DATA)}


async def test_segments_of_two_writes_of_one_object_are_told_apart_inside(
    store: EncryptedStore, bucket: MemoryStore
) -> None:
    """Both mean the same to whoever may read them; the digests inside find the mixture."""
    await store.put(KEY, held(DATA), if_absent=True)
    key, first = only(bucket)
    await store.put(KEY, held(bytes(len(DATA))), if_absent=False)
    _, second = only(bucket)
    bucket.hold(key, first[: HEADER_BYTES + _STORED] + second[HEADER_BYTES + _STORED :])
    assert await read(store, len(DATA)) == (
        len(DATA),
        DATA[:SEGMENT_BYTES] + bytes(len(DATA) - SEGMENT_BYTES),
    )


async def test_after_a_rotation_old_objects_are_read_and_new_ones_have_the_new_key(
    store: EncryptedStore, bucket: MemoryStore
) -> None:
    await store.put(KEY, held(DATA), if_absent=True)
    old_key, _ = only(bucket)
    rotated = EncryptedStore(bucket, Keyring([OTHER, MASTER]))
    assert await read(rotated, len(DATA)) == (len(DATA), DATA)
    info = await rotated.get_into(KEY, apart(SEGMENT_BYTES), first=0)
    assert info.nbytes == len(DATA)
    head = await rotated.head(KEY)
    assert head.key == old_key
    assert await rotated.refresh(head.key, head.modified_s)  # as a refresher does
    assert await rotated.put(KEY, held(DATA), if_absent=True)
    assert len(bucket._objects) == 2

    without_old = EncryptedStore(bucket, Keyring([OTHER]))
    await bucket.delete(old_key)
    assert await read(without_old, len(DATA)) == (len(DATA), DATA)
    assert await read(store, len(DATA)) is None  # the old key alone


async def test_an_absent_object_costs_one_request_for_each_key(bucket: MemoryStore) -> None:
    for keys_held in ([MASTER], [MASTER, OTHER]):
        bucket.asked.clear()
        assert await read(EncryptedStore(bucket, Keyring(keys_held)), 100) is None
        assert bucket.asked["get_into"] == len(keys_held)


async def test_what_is_no_object_passes_as_it_is(
    store: EncryptedStore, bucket: MemoryStore
) -> None:
    for key in (rig.NAMESPACE.manifest, rig.NAMESPACE.shape("whole"), "s3kv/v3/cleaner.json"):
        assert await store.put(key, Place.of(b"text"), if_absent=True)
        assert bucket._objects[key][0] == b"text"
        place = Place.of(bytearray(4))
        assert await store.get_into(key, place)
        assert bytes(place) == b"text"
        assert await store.get_into(key, Place.of(bytearray(2)), first=1)
        assert await store.head(key)
        assert await store.refresh(key, 1e12)
        assert await store.delete(key)
    assert bucket._objects == {}


async def test_a_listing_has_the_keys_of_encrypted_objects_which_can_be_used(
    store: EncryptedStore, bucket: MemoryStore
) -> None:
    for number in range(3):
        await store.put(rig.object_key(number), held(DATA[:100]), if_absent=True)
    listed = [info async for info in store.list(rig.NAMESPACE.root)]
    assert [info.nbytes for info in listed] == [encrypted_bytes(100)] * 3
    assert await store.folders("s3kv/v3/", 5) == [rig.NAMESPACE.digest]
    assert await store.check(rig.NAMESPACE.root)
    assert await store.delete_many(listed[:1]) == []
    assert await store.delete(listed[1].key, if_etag=listed[1].etag)
    info = await store.get_into(listed[2].key, Place.of(bytearray(encrypted_bytes(100))))
    assert info == listed[2]
    assert await store.erase(listed[2].key)
    assert bucket._objects == {}
    await store.close()


async def test_deleting_an_object_deletes_the_encrypted_one(
    store: EncryptedStore, bucket: MemoryStore
) -> None:
    for delete in (store.delete, store.erase):
        await store.put(KEY, held(DATA[:10]), if_absent=True)
        assert await delete(KEY)
        assert bucket._objects == {}


async def test_memory_is_bounded_and_given_back(
    bucket: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_WRITTEN_BYTES", 2 * encrypted_bytes(SEGMENT_BYTES))
    store, most = EncryptedStore(bucket, Keyring([MASTER])), 0
    gate = asyncio.Event()

    async def begin(verb: str, key: str) -> None:
        nonlocal most
        most = max(most, store._written.leased_bytes)
        await gate.wait()

    monkeypatch.setattr(bucket, "begin", begin)
    data = DATA[:SEGMENT_BYTES]
    writes = [
        asyncio.ensure_future(store.put(rig.object_key(n), held(data), if_absent=True))
        for n in range(6)
    ]
    for _ in range(50):
        await asyncio.sleep(0)
    writes[0].cancel()
    gate.set()
    await asyncio.wait(writes)
    assert most == 2 * encrypted_bytes(SEGMENT_BYTES)
    assert store._written.leased_bytes == 0
    assert len(bucket._objects) == 5
    assert await read(store, len(data), rig.object_key(5)) == (len(data), data)
    assert store._read.leased_bytes == 0


async def test_no_read_waits_for_writes_that_hang(
    store: EncryptedStore, bucket: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.put(KEY, held(DATA), if_absent=True)
    monkeypatch.setattr(module, "MOST_READ_BYTES", encrypted_bytes(len(DATA)))
    monkeypatch.setattr(module, "MOST_WRITTEN_BYTES", encrypted_bytes(len(DATA)))
    store = EncryptedStore(bucket, Keyring([MASTER]))
    real = bucket.begin

    async def begin(verb: str, key: str) -> None:
        await (asyncio.Event().wait() if verb == "put" else real(verb, key))

    monkeypatch.setattr(bucket, "begin", begin)
    writes = [
        asyncio.ensure_future(store.put(rig.object_key(n), held(DATA), if_absent=True))
        for n in range(2)
    ]
    await asyncio.sleep(0.01)
    assert await asyncio.wait_for(read(store, len(DATA)), 5) == (len(DATA), DATA)
    for write in writes:
        write.cancel()
    await asyncio.wait(writes)


async def test_other_work_goes_on_while_a_large_object_is_encrypted(store: EncryptedStore) -> None:
    turns = 0

    async def tick() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    ticking = asyncio.ensure_future(tick())
    await store.put(KEY, held(DATA), if_absent=True)
    ticking.cancel()
    assert turns >= 4
