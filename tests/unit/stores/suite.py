"""What every `ObjectStore` must do, as tests. Subclass it and give it a `store` fixture.

Nothing but the verbs of `ObjectStore` is used. Keys are fresh in every
test; nothing else in the bucket is touched.
"""

from __future__ import annotations

import asyncio
import uuid
from os.path import normpath

import pytest

from s3kv.errors import StoreUnranged
from s3kv.place import Place
from s3kv.stores.store import ObjectStore, read_small

ODD_NAMES = (
    *("plain", "with space", "plus+and&equals=", "per%20cent%", "ünïcödé-漢字"),
    *("a//b", "a/../b", "./dot", "question?hash#", "quotes'\"<>", "tilde~star*(paren)"),
)


def pattern(nbytes: int, seed: int) -> memoryview:
    """Bytes that differ from position to position and from seed to seed."""
    unit = b"".join((i * 2654435761 + seed).to_bytes(8, "little") for i in range(512))
    return memoryview((unit * (nbytes // len(unit) + 1))[:nbytes])


def apart(nbytes: int, header_bytes: int = 1000) -> Place:
    """A place of so many bytes whose payload is in other memory than its header."""
    lengths = header_bytes, nbytes - header_bytes
    return Place(*(memoryview(bytearray(b"\xee" * length)) for length in lengths))


class Recorder:
    """A receiver into `memory` (None: another read has the place). begun: the lengths of objects
    it was given. seen: the bytes that had arrived at each call."""

    def __init__(self, memory: Place | None) -> None:
        self.memory = memory
        self.begun: list[int] = []
        self.seen: list[bytes] = []

    def begin(self, nbytes: int) -> Place | None:
        self.begun.append(nbytes)
        return self.memory

    def arrived(self, nbytes: int) -> None:
        if self.memory is not None:
            self.seen.append(bytes(self.memory.cut(0, nbytes)))

    def check(self, data: bytes) -> None:
        """What arrived grew, and was the front of `data`."""
        assert bytes(self.memory.cut(0, len(data))) == data
        lengths = [len(seen) for seen in self.seen]
        assert lengths == sorted(set(lengths))
        assert all(data.startswith(seen) for seen in self.seen)


async def write(store: ObjectStore, key: str, data: memoryview, *, if_absent: bool = False) -> bool:
    return await store.put(key, Place.of(data), if_absent=if_absent)


async def fetch(store: ObjectStore, key: str, room: int = 2**16) -> bytes | None:
    came = await read_small(store, key, room)
    return came and came[1]


class ObjectStoreSuite:
    conditional_deletes = True
    conditional_copies = True
    keys_are_texts = True
    """Otherwise they are paths of files, without `.`, `..` and `//`."""
    conditional_batches = True
    """Whether that goes for deleting many at once, too."""

    @staticmethod
    def listed_bytes(nbytes: int) -> int:
        """What a listing says of an object of `nbytes`."""
        return nbytes

    @pytest.fixture
    def root(self) -> str:
        return f"suite/{uuid.uuid4().hex}/"

    async def test_missing_object_is_an_answer(self, store: ObjectStore, root: str) -> None:
        buffer = memoryview(bytearray(b"untouched"))
        assert await store.get_into(root + "no", Place.of(buffer)) is None
        assert await store.get_into(root + "no", Place.of(buffer), first=0) is None
        assert bytes(buffer) == b"untouched"
        assert await store.head(root + "no") is None

    @pytest.mark.parametrize("nbytes", [0, 1, 4096, 2**20 + 7])
    async def test_round_trip(self, store: ObjectStore, root: str, nbytes: int) -> None:
        data = pattern(nbytes, 1)
        assert await store.put(root + "k", Place.of(data), if_absent=False) is True
        assert await fetch(store, root + "k", room=nbytes) == bytes(data)
        info = await store.head(root + "k")
        assert (info.key, info.nbytes) == (root + "k", nbytes)

    async def test_buffer_too_small_tells_the_length(self, store: ObjectStore, root: str) -> None:
        await write(store, root + "k", pattern(300_000, 1))
        memory = bytearray(b"\xee" * 2000)
        info = await store.get_into(root + "k", Place.of(memoryview(memory)[:1000]))
        assert info.nbytes == 300_000
        assert memory[1000:] == b"\xee" * 1000
        assert await fetch(store, root + "k", room=300_000) == bytes(pattern(300_000, 1))

    @pytest.mark.parametrize("nbytes", [0, 1, 999, 1000, 1001, 700_000])
    async def test_header_and_payload_apart(
        self, store: ObjectStore, root: str, nbytes: int
    ) -> None:
        """The object fills the header first, and leaves the rest of the place alone."""
        data = bytes(pattern(nbytes, 1))
        place = apart(nbytes + 1007)
        place.write(data)
        assert await store.put(root + "k", place.cut(0, nbytes), if_absent=True) is True
        read = apart(nbytes + 1500)
        info = await store.get_into(root + "k", read)
        assert (info.nbytes, info) == (nbytes, await store.head(root + "k"))
        assert bytes(read) == data + b"\xee" * 1500

    @pytest.mark.parametrize(
        "bounds",
        [
            *((0, 3000), (0, 1000), (999, 1001), (1000, 3000), (10, 20), (2000, 2001)),
            *((0, 1), (2999, 3000)),
        ],
    )
    async def test_a_range(self, store: ObjectStore, root: str, bounds: tuple[int, int]) -> None:
        """It fills its part of a place, on either side of the seam, and tells what a HEAD tells."""
        begin, end = bounds
        await write(store, root + "k", pattern(3000, 1))
        place = apart(3000)
        info = await store.get_into(root + "k", place.cut(begin, end), first=begin)
        assert info == await store.head(root + "k")
        expected = bytearray(b"\xee" * 3000)
        expected[begin:end] = pattern(3000, 1)[begin:end]
        assert bytes(place) == expected

    async def test_a_place_that_another_read_has(self, store: ObjectStore, root: str) -> None:
        await write(store, root + "k", pattern(3000, 1))
        place, other = apart(3000), Recorder(None)
        await store.get_into(root + "k", place, other)
        await store.get_into(root + "k", place.cut(500, 2500), other, 500)
        assert bytes(place) == b"\xee" * 3000
        assert (other.begun, other.seen) == ([3000, 3000], [])

    @pytest.mark.parametrize("nbytes", [0, 1, 2, 3000, 700_000])
    async def test_a_receiver_has_the_memory(
        self, store: ObjectStore, root: str, nbytes: int
    ) -> None:
        """The object arrives at the end of a larger place, and nowhere else."""
        data = bytes(pattern(nbytes, 1))
        await write(store, root + "k", pattern(nbytes, 1))
        place = apart(nbytes + 1500)
        receiver = Recorder(place.cut(1500, place.nbytes))
        assert await store.get_into(root + "k", place, receiver) == await store.head(root + "k")
        assert bytes(place) == b"\xee" * 1500 + data
        assert receiver.begun == [nbytes]
        receiver.check(data)

    @pytest.mark.parametrize(("room", "nbytes"), [(2999, 3000), (3000, 2999), (2999, 2999)])
    async def test_an_object_longer_than_the_place_or_the_memory(
        self, store: ObjectStore, root: str, room: int, nbytes: int
    ) -> None:
        await write(store, root + "k", pattern(3000, 1))
        receiver = Recorder(Place.of(bytearray(nbytes)))
        info = await store.get_into(root + "k", apart(room), receiver)
        assert (info.nbytes, receiver.begun, receiver.seen) == (3000, [3000], [])
        assert await fetch(store, root + "k") == bytes(pattern(3000, 1))

    @pytest.mark.parametrize(
        ("first", "nbytes"), [(0, 700_000), (0, 800_000), (5, 600_000), (699_999, 1), (9, 900_000)]
    )
    async def test_a_receiver_of_a_range(
        self, store: ObjectStore, root: str, first: int, nbytes: int
    ) -> None:
        """It begins with the length of the whole object, wherever the range ends."""
        data = bytes(pattern(700_000, 1)[first : first + nbytes])
        await write(store, root + "k", pattern(700_000, 1))
        place = apart(nbytes + 1500)
        receiver = Recorder(place.cut(1500, 1500 + len(data)))
        info = await store.get_into(root + "k", place.cut(0, nbytes), receiver, first)
        assert info == await store.head(root + "k")
        assert receiver.begun == [700_000]
        receiver.check(data)
        assert bytes(place.cut(0, 1500)) == b"\xee" * 1500

    async def test_no_object_begins_if_there_is_none(self, store: ObjectStore, root: str) -> None:
        await write(store, root + "k", pattern(3000, 1))
        receiver = Recorder(Place.of(bytearray(10)))
        assert await store.get_into(root + "no", apart(3000), receiver) is None
        assert await store.get_into(root + "no", apart(3000), receiver, 0) is None
        with pytest.raises(StoreUnranged):
            await store.get_into(root + "k", apart(3000), receiver, 3000)
        assert (receiver.begun, receiver.seen) == ([], [])

    @pytest.mark.parametrize("first", [0, 1000, 2999])
    async def test_an_object_that_ends_within_the_range(
        self, store: ObjectStore, root: str, first: int
    ) -> None:
        await write(store, root + "k", pattern(3000, 1))
        place = apart(5000)
        info = await store.get_into(root + "k", place, first=first)
        assert (info, info.nbytes) == (await store.head(root + "k"), 3000)
        assert bytes(place) == bytes(pattern(3000, 1)[first:]) + b"\xee" * (2000 + first)

    @pytest.mark.parametrize("first", [3000, 3001, 9000])
    async def test_a_range_beyond_the_end(self, store: ObjectStore, root: str, first: int) -> None:
        await write(store, root + "k", pattern(3000, 1))
        memory = bytearray(b"\xee" * 3)
        with pytest.raises(StoreUnranged):
            await store.get_into(root + "k", Place.of(memoryview(memory)[:2]), first=first)
        assert memory[2:] == b"\xee"
        assert await fetch(store, root + "k") == bytes(pattern(3000, 1))

    async def test_ranges_of_one_object_have_one_etag(self, store: ObjectStore, root: str) -> None:
        async def etag(first: int) -> str:
            return (await store.get_into(root + "k", Place.of(bytearray(1000)), first=first)).etag

        await write(store, root + "k", pattern(3000, 1))
        before = {await etag(first) for first in (0, 1000, 2000)}
        await write(store, root + "k", pattern(3000, 2))
        after = await etag(0)
        assert len(before) == 1
        assert after not in before

    async def test_a_small_object_has_an_end(self, store: ObjectStore, root: str) -> None:
        await write(store, root + "k", pattern(3000, 1))
        info = await store.head(root + "k")
        assert await read_small(store, root + "k", 3000) == (info, bytes(pattern(3000, 1)))
        assert await read_small(store, root + "k", 2999) == (info, b"")
        assert await read_small(store, root + "no", 3000) is None

    async def test_many_at_once(self, store: ObjectStore, root: str) -> None:
        async def there_and_back(i: int) -> bytes | None:
            assert await write(store, f"{root}{i}", pattern(100_000 + i, i), if_absent=True)
            return await fetch(store, f"{root}{i}", room=2**17)

        came = await asyncio.gather(*(there_and_back(i) for i in range(32)))
        assert came == [bytes(pattern(100_000 + i, i)) for i in range(32)]

    async def test_erase(self, store: ObjectStore, root: str) -> None:
        for seed in (1, 2):
            await write(store, root + "k", pattern(100, seed))
        for _ in range(2):
            assert await store.erase(root + "k") is True
            assert await store.head(root + "k") is None

    async def test_overwrite(self, store: ObjectStore, root: str) -> None:
        await write(store, root + "k", pattern(100, 1))
        assert await write(store, root + "k", pattern(50, 2)) is True
        assert await fetch(store, root + "k") == bytes(pattern(50, 2))

    async def test_if_absent_keeps_what_is_there(self, store: ObjectStore, root: str) -> None:
        assert await write(store, root + "k", pattern(100, 1), if_absent=True) is True
        assert await write(store, root + "k", pattern(100, 2), if_absent=True) is False
        assert await fetch(store, root + "k") == bytes(pattern(100, 1))

    async def test_if_absent_race_has_one_winner(self, store: ObjectStore, root: str) -> None:
        won = await asyncio.gather(
            *(write(store, root + "k", pattern(5000, i), if_absent=True) for i in range(10))
        )
        assert won.count(True) == 1
        assert await fetch(store, root + "k") == bytes(pattern(5000, won.index(True)))

    async def test_a_read_tells_what_a_head_tells(self, store: ObjectStore, root: str) -> None:
        await write(store, root + "k", pattern(100, 1), if_absent=True)
        read = await store.get_into(root + "k", Place.of(bytearray(100)))
        head = await store.head(root + "k")
        assert read == head
        for info in (read, head):
            assert 0 <= info.age_s < 60

    async def test_copy_onto_itself(self, store: ObjectStore, root: str) -> None:
        """Everything stays but the time of the last write."""
        key = root + "k +ü&%20"
        await write(store, key, pattern(100_000, 1), if_absent=True)
        before = await store.head(key)
        await asyncio.sleep(1.1)  # what a HEAD tells apart
        assert await store.refresh(key, before.modified_s) is True
        after = await store.head(key)
        assert after.modified_s > before.modified_s
        assert (after.nbytes, after.etag) == (before.nbytes, before.etag)
        assert await fetch(store, key, room=100_000) == bytes(pattern(100_000, 1))

    async def test_copy_of_what_is_not_there(self, store: ObjectStore, root: str) -> None:
        assert await store.refresh(root + "no", 2e9) is False
        assert await store.head(root + "no") is None

    async def test_copy_of_what_has_been_written_since(self, store: ObjectStore, root: str) -> None:
        """Where the server knows no such condition, the new object is copied."""
        await write(store, root + "k", pattern(100, 1), if_absent=True)
        written = await store.head(root + "k")
        refreshed = await store.refresh(root + "k", written.modified_s - 3600)
        assert refreshed is not self.conditional_copies
        assert await fetch(store, root + "k") == bytes(pattern(100, 1))

    async def test_delete(self, store: ObjectStore, root: str) -> None:
        await write(store, root + "k", pattern(10, 1))
        await store.delete(root + "k")
        assert await fetch(store, root + "k") is None
        await store.delete(root + "k")
        await store.delete(root + "never")

    async def test_conditional_delete(self, store: ObjectStore, root: str) -> None:
        """Of servers that know none only the second half can be asked."""
        await write(store, root + "k", pattern(10, 1))
        first = await store.head(root + "k")
        await write(store, root + "k", pattern(10, 2))
        second = await store.head(root + "k")
        assert first.etag != second.etag
        listed = [info async for info in store.list(root + "k")]
        assert [info.etag for info in listed] == [second.etag]
        if self.conditional_deletes:
            assert await store.delete(root + "k", if_etag=first.etag) is False
            assert await fetch(store, root + "k") == bytes(pattern(10, 2))
        assert await store.delete(root + "k", if_etag=second.etag) is True
        assert await fetch(store, root + "k") is None
        await store.delete(root + "k", if_etag=second.etag)

    async def test_delete_many(self, store: ObjectStore, root: str) -> None:
        """Of servers without conditional deletes, what has changed goes as well."""
        names = [f"{root}{i} <&> ü+%20'\"" for i in range(5)]
        await asyncio.gather(*(write(store, n, pattern(9, 1), if_absent=True) for n in names))
        await write(store, root + "other", pattern(9, 1), if_absent=True)
        listed = [info async for info in store.list(root) if info.key in names]
        await write(store, names[2], pattern(9, 2))
        await store.delete(names[3])
        left = await store.delete_many(listed)
        kept = [names[2]] if self.conditional_batches else []
        assert list(left) == kept
        assert [info.key async for info in store.list(root)] == [*kept, root + "other"]

    async def test_a_listing_begins_after_a_key(self, store: ObjectStore, root: str) -> None:
        names = [f"{root}{i:03} +ü" for i in range(25)]
        await asyncio.gather(*(write(store, n, pattern(7, 1), if_absent=True) for n in names))
        assert [info.key async for info in store.list(root, names[11])] == names[12:]
        assert [info.key async for info in store.list(root, names[-1])] == []

    async def test_odd_characters_in_keys(self, store: ObjectStore, root: str) -> None:
        names = [n for n in ODD_NAMES if self.keys_are_texts or normpath(n) == n]
        for i, name in enumerate(names):
            await write(store, root + name, pattern(10 + i, i), if_absent=True)
        for i, name in enumerate(names):
            assert await fetch(store, root + name) == bytes(pattern(10 + i, i)), name
        listed = [info.key async for info in store.list(root)]
        assert listed == sorted((root + name for name in names), key=str.encode)

    async def test_list_is_ordered_and_crosses_pages(self, store: ObjectStore, root: str) -> None:
        names = [f"{root}d/{i:03}" for i in range(25)]
        await asyncio.gather(*(write(store, n, pattern(7, 1), if_absent=True) for n in names))
        await write(store, f"{root}e", pattern(7, 1), if_absent=True)
        infos = [info async for info in store.list(f"{root}d/")]
        assert [info.key for info in infos] == names
        assert {info.nbytes for info in infos} == {self.listed_bytes(7)}
        head = await store.head(names[0])
        assert abs(head.modified_s - infos[0].modified_s) < 1.5  # a HEAD tells whole seconds
        assert [info async for info in store.list(f"{root}f")] == []

    async def test_folders(self, store: ObjectStore, root: str) -> None:
        for name in ("b/1", "b/2/3", "a b+/1", "c", "d/"):
            await write(store, root + name, pattern(7, 1), if_absent=True)
        assert list(await store.folders(root, 100)) == ["a b+", "b", "d"]
        assert list(await store.folders(root, 2)) == ["a b+", "b"]
        assert list(await store.folders(root + "none/", 100)) == []

    @pytest.mark.parametrize("header_bytes", [0, 4096, 2**21])
    async def test_cancelled_get_leaves_the_place_alone(
        self, store: ObjectStore, root: str, header_bytes: int
    ) -> None:
        nbytes = 2**22
        await write(store, root + "k", pattern(nbytes, 1))
        for turns in (0, 1, 2, 5, 10, 20, 40):
            place = apart(nbytes, header_bytes)
            task = asyncio.create_task(store.get_into(root + "k", place))
            for _ in range(turns):
                await asyncio.sleep(0.0005)
            task.cancel()
            await asyncio.wait([task])
            place.write(b"\xee" * nbytes)
            await asyncio.sleep(0.01)
            assert bytes(place) == b"\xee" * nbytes
        assert await fetch(store, root + "k", room=nbytes) == bytes(pattern(nbytes, 1))

    @pytest.mark.parametrize("header_bytes", [0, 4096, 2**21])
    async def test_cancelled_put_is_whole_or_absent(
        self, store: ObjectStore, root: str, header_bytes: int
    ) -> None:
        nbytes = 2**22
        for turns in (0, 1, 3, 6):
            place = apart(nbytes, header_bytes)
            place.write(pattern(nbytes, turns))
            key = f"{root}{turns}"
            task = asyncio.create_task(store.put(key, place, if_absent=False))
            for _ in range(turns):
                await asyncio.sleep(0.0005)
            task.cancel()
            await asyncio.wait([task])
            place.write(b"\xee" * nbytes)
            await asyncio.sleep(0.02)
            assert await fetch(store, key, room=nbytes) in (None, bytes(pattern(nbytes, turns)))

    async def test_check_says_whether_there_is_an_object(
        self, store: ObjectStore, root: str
    ) -> None:
        await store.check()
        assert await store.check(root) is False
        await write(store, root + "k", pattern(10, 1))
        assert await store.check(root) is True
        assert await store.check(root + "elsewhere/") is False

    async def test_close_twice(self, store: ObjectStore, root: str) -> None:
        await write(store, root + "k", pattern(10, 1))
        await store.close()
        await store.close()
