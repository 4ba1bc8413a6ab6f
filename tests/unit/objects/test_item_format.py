"""Objects whose length is known only when they are there."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from s3kv.objects.headers import read_header
from s3kv.objects.integrity import Integrity
from s3kv.objects.item_format import HEADER_BYTES, TENSOR, ItemFormat, object_bytes, width_of
from s3kv.place import Place
from s3kv.types import ItemShape

NAMESPACE = "0123456789abcdef" * 2
HASH = bytes(range(32))


def sealed(rows: int, width: int, *, namespace: str = NAMESPACE) -> bytearray:
    nbytes = object_bytes("BF16", rows, width)
    data = bytearray(HEADER_BYTES) + random.Random(rows).randbytes(nbytes - HEADER_BYTES)
    ItemFormat(namespace, "BF16", ItemShape(rows, nbytes)).seal(Place.of(data, HEADER_BYTES), HASH)
    return data


def reader(rows: int, room: int, *, namespace: str = NAMESPACE) -> ItemFormat:
    return ItemFormat(namespace, "BF16", ItemShape(rows, room))


def check(item: ItemFormat, data: bytes, nbytes: int, block_hash: bytes = HASH) -> str | None:
    return item.check(Place.of(data, HEADER_BYTES), nbytes, block_hash)


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (32, 128), (576, 1024), (7, 3)])
def test_a_reader_needs_the_rows_and_enough_room(rows: int, width: int, tmp_path: Path) -> None:
    data = sealed(rows, width)
    room = bytearray(len(data) + 10_000)
    room[: len(data)] = data
    assert check(reader(rows, len(room)), room, len(data)) is None
    assert width_of("BF16", rows, len(data)) == width
    assert read_header(memoryview(data)).header_bytes == HEADER_BYTES
    path = tmp_path / "item.safetensors"
    path.write_bytes(data)
    with safe_open(path, "pt") as file:
        tensor = file.get_tensor(TENSOR)
    assert tuple(tensor.shape) == (rows, width)
    assert tensor.view(torch.uint8).numpy().tobytes() == data[HEADER_BYTES:]


def test_a_flipped_bit_anywhere_is_refused() -> None:
    data = sealed(3, 40)
    draw = random.Random(1)
    for place in [*range(600), *(draw.randrange(len(data)) for _ in range(400))]:
        data[place] ^= 1 << draw.randrange(8)
        assert check(reader(3, len(data)), data, len(data)) is not None, place
        data[:] = sealed(3, 40)


def test_with_a_key_an_item_without_it_is_refused() -> None:
    keyed = Integrity("blake3-keyed", bytes(32))
    shape = ItemShape(3, object_bytes("BF16", 3, 40))
    data = sealed(3, 40)
    item = ItemFormat(NAMESPACE, "BF16", shape, keyed)
    assert check(item, data, len(data)) == "algorithm"
    item.seal(Place.of(data, item.header_bytes), HASH)
    assert check(item, data, len(data)) is None
    data[-1] ^= 1
    assert check(item, data, len(data)) == "digest"


def test_another_length_is_refused() -> None:
    data = sealed(6, 4)
    for nbytes in (0, 1, HEADER_BYTES, len(data) - 1, len(data) - 12, len(data) - 2 * 6):
        assert check(reader(6, len(data)), data, nbytes) is not None, nbytes
    assert check(reader(6, len(data)), data, len(data) + 12) == "length"
    assert check(reader(6, len(data) - 12), data, len(data)) == "length"


def test_another_item_is_refused() -> None:
    data = sealed(6, 4)
    assert check(reader(6, len(data)), data, len(data), HASH[::-1]) == "block_hash"
    assert check(reader(6, len(data), namespace="f" * 32), data, len(data)) == "namespace"
    # As many bytes in other rows: a reader that expects another number of tokens.
    assert check(reader(4, len(data)), data, len(data)) == "tensors"
    assert check(reader(5, len(data)), data, len(data)) == "length"


def test_a_shape_of_no_whole_rows_is_not_written() -> None:
    with pytest.raises(ValueError, match="not the length"):
        reader(3, HEADER_BYTES + 7).seal(Place.of(bytearray(HEADER_BYTES + 7), HEADER_BYTES), HASH)
    assert width_of("BF16", 0, HEADER_BYTES + 8) is None
