from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from s3kv.objects.codec import ALIGN_BYTES, SEGMENT_BYTES, ChunkFormat, Gathering
from s3kv.objects.headers import MAX_HEADER_BYTES, read_header
from s3kv.objects.integrity import Integrity
from s3kv.place import Place
from s3kv.types import TensorSpec
from tests.unit.stores.suite import pattern

DIGEST = "0123456789abcdef0123456789abcdef"
HASH = bytes(range(32))
KV = TensorSpec(
    "g0",
    "BF16",
    (2, 2, 3),
    tuple(TensorSpec(f"layers.{n}.kv", "BF16", (3,), (), "C") for n in range(2)),
)
UNLIKE = TensorSpec(
    "g1",
    "U8",
    (2, 6),
    (TensorSpec("layers.10.kv", "F32", (1,), (), "C"), TensorSpec("layers.2.scale", "U8", (2,))),
)
FORMAT = ChunkFormat(
    DIGEST, (KV, UNLIKE, TensorSpec("rest", "U8", ())), 1, "h0-3of8-l0-31of32", first_block=3
)


def swapped(tensor: TensorSpec) -> TensorSpec:
    first, *others = tensor.layers
    return dataclasses.replace(tensor, layers=(dataclasses.replace(first, order="N"), *others))


def sealed(
    chunk_format: ChunkFormat = FORMAT, block_hash: bytes = HASH, seed: int = 1
) -> memoryview:
    buffer = memoryview(bytearray(chunk_format.object_bytes))
    buffer[chunk_format.header_bytes :] = pattern(chunk_format.payload_bytes, seed)
    chunk_format.seal(Place.of(buffer, chunk_format.header_bytes), block_hash)
    return buffer


def check(
    buffer: memoryview | bytes, chunk_format: ChunkFormat = FORMAT, block_hash: bytes = HASH
) -> str | None:
    view = memoryview(buffer)
    return chunk_format.check(Place.of(view, chunk_format.header_bytes), len(view), block_hash)


def test_safetensors_reads_it(tmp_path: Any) -> None:
    data = bytes(sealed())
    payload = data[FORMAT.header_bytes :]
    tensors = safetensors.torch.load(data)
    assert sorted(tensors) == sorted(t.name for t in FORMAT.tensors)
    assert tensors["g1"].flatten().tolist() == list(payload[24:36])
    assert (tensors["g0"].shape, tensors["g0"].dtype) == ((2, 2, 3), torch.bfloat16)
    (tmp_path / "chunk").write_bytes(data)
    with safetensors.safe_open(tmp_path / "chunk", framework="pt") as file:
        assert file.metadata()["s3kv.block_hash"] == HASH.hex()
        assert file.get_tensor("rest").item() == payload[36]


@given(layers=st.integers(1, 200))
def test_header_is_aligned_for_any_number_of_layers(layers: int) -> None:
    tensors = tuple(TensorSpec(f"model.layers.{i}.kv", "U8", (1,)) for i in range(layers))
    chunk_format = ChunkFormat(DIGEST, tensors, 0, "t0")
    assert chunk_format.header_bytes % ALIGN_BYTES == 0
    buffer = sealed(chunk_format)
    assert check(buffer, chunk_format) is None
    assert len(safetensors.torch.load(bytes(buffer))) == layers


def test_round_trip_by_parser() -> None:
    buffer = sealed()
    header = read_header(buffer)
    assert header.tensors == FORMAT.tensors
    assert (header.namespace_digest, header.coverage, header.shard) == (DIGEST, 1, FORMAT.shard)
    assert (header.block_hash, header.algorithm) == (HASH, "xxh3-128")
    assert (header.first_block, header.blocks, len(header.digests)) == (3, 2, 3)
    assert header.payload_bytes == FORMAT.payload_bytes
    assert read_header(buffer[: FORMAT.header_bytes], object_bytes=len(buffer)) == header


def test_every_single_damaged_byte_is_refused() -> None:
    buffer = sealed()
    for at in range(len(buffer)):
        buffer[at] ^= 0x01
        assert check(buffer) is not None, at
        buffer[at] ^= 0x01
    assert check(buffer) is None


@given(nbytes=st.integers(0, 2 * FORMAT.object_bytes))
def test_any_other_length_is_refused(nbytes: int) -> None:
    data = (bytes(sealed()) * 2)[:nbytes]
    assert check(data) == (None if nbytes == FORMAT.object_bytes else "length")


def test_length_beyond_the_buffer_is_refused() -> None:
    buffer = sealed()
    assert FORMAT.check(Place.of(buffer, FORMAT.header_bytes), len(buffer) + 1, HASH) == "length"
    assert FORMAT.check(Place.of(buffer[:-1], FORMAT.header_bytes), len(buffer), HASH) == "length"


@given(block_hash=st.binary(min_size=1, max_size=64))
def test_foreign_hash_is_refused(block_hash: bytes) -> None:
    assert check(sealed(block_hash=block_hash)) == (None if block_hash == HASH else "block_hash")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"namespace_digest": "f" * 32}, "namespace"),
        ({"coverage": 2}, "coverage"),
        ({"shard": "h4-7of8-l0-31of32"}, "shard"),
        ({"first_block": 4}, "blocks"),
        ({"tensors": (*FORMAT.tensors[:2], TensorSpec("other", "U8", ()))}, "tensors"),
        ({"tensors": (KV, TensorSpec("g1", "U8", (2, 6)), FORMAT.tensors[2])}, "tensors"),
        ({"tensors": (swapped(KV), UNLIKE, FORMAT.tensors[2])}, "tensors"),
        ({"tensors": (TensorSpec("g0", "U8", (37,)),)}, "blocks"),
        ({"tensors": (TensorSpec("a", "U8", (36,)),)}, "length"),
    ],
)
def test_foreign_format_is_refused(change: dict[str, Any], reason: str) -> None:
    assert check(sealed(dataclasses.replace(FORMAT, **change))) == reason


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (b'"s3kv.format":"3"', b'"s3kv.format":"2"', "version"),
        (b'xxh3-128"', b'xxh3-64" ', "algorithm"),
        (b"layers.0.kv", b"layers.7.kv", "tensors"),
        (b"[1]", b"[2]", "tensors"),
        (b"[2,2,3]", b"[2,3,2]", "tensors"),
        (b'[],"data_offsets":[36,37]', b'[2],"data_offsets":[36,38]', "length"),
        (b"}} ", b"} }", "header"),
        (b"__metadata__", b"__mitadata__", "header"),
    ],
)
def test_altered_header_is_refused(old: bytes, new: bytes, reason: str) -> None:
    data = bytes(sealed())
    assert data.count(old) == 1
    assert check(data.replace(old, new)) == reason


LARGE = ChunkFormat(
    DIGEST,
    (
        TensorSpec("small", "U8", (5,)),
        TensorSpec("large", "U8", (2 * SEGMENT_BYTES + 1,)),
        TensorSpec("none", "U8", (0,)),
        TensorSpec("exact", "U8", (SEGMENT_BYTES,)),
    ),
    0,
    "whole",
)


def test_a_segment_is_8_mib_of_one_part() -> None:
    assert [len(span) for span in LARGE.segments] == [5, 2**23, 2**23, 1, 2**23]
    assert LARGE.segments[-1].stop == LARGE.payload_bytes


@pytest.mark.parametrize("mode", ["xxh3", "blake3-keyed", "none"])
@settings(max_examples=20)
@given(cuts=st.sets(st.integers(1, FORMAT.object_bytes - 1), max_size=8), order=st.randoms())
def test_an_object_arrives_in_any_order(mode: Any, cuts: set[int], order: Any) -> None:
    form = dataclasses.replace(FORMAT, integrity=Integrity(mode, bytes(32)))
    data = sealed(form)
    arriving = list(itertools.pairwise([0, *sorted(cuts), len(data)]))
    order.shuffle(arriving)
    for at in (None, 0, form.header_bytes, len(data) - 1):
        lengths = form.header_bytes, form.payload_bytes
        place = Place(*(memoryview(bytearray(length)) for length in lengths))
        place.write(bytes(byte ^ 0xFF for byte in data))  # none is right before it arrives
        gathering = Gathering(form, place, HASH)
        for begin, end in arriving:
            assert gathering.check(len(data)) is not None
            place.write(data[begin:end], begin)
            if at is not None and begin <= at < end:
                place.write(bytes([data[at] ^ 1]), at)
            gathering.arrived(begin, end)
        assert gathering.check(len(data)) == form.check(place, len(data), HASH)
        assert gathering.check(len(data) + 1) == "length"


def test_with_a_key_a_segment_has_a_place() -> None:
    """Equal segments have different digests, so that none can stand for another."""
    specs = tuple(TensorSpec(name, "U8", (8,)) for name in "ab")
    form = ChunkFormat(DIGEST, specs, 0, "whole", Integrity("blake3-keyed", bytes(32)))
    buffer = memoryview(bytearray(form.object_bytes))
    form.seal(Place.of(buffer, form.header_bytes), HASH)
    one, other = read_header(buffer).digests
    assert one != other
    swapped = bytes(buffer).replace(f"{one},{other}".encode(), f"{other},{one}".encode())
    assert check(swapped, form) == "digest"


@pytest.mark.parametrize(
    "change",
    [lambda d: d[:-1], lambda d: [*d, d[0]], lambda d: d[::-1], lambda d: [d[0]] * 3, lambda d: []],
    ids=["short", "long", "reversed", "repeated", "empty"],
)
def test_a_list_of_other_digests_is_refused(change: Callable[[list[str]], list[str]]) -> None:
    digests = list(read_header(sealed()).digests)
    data = bytes(sealed())
    header = data[: FORMAT.header_bytes].rstrip()
    header = header.replace(",".join(digests).encode(), ",".join(change(digests)).encode())
    assert check(header.ljust(FORMAT.header_bytes) + data[FORMAT.header_bytes :]) == "digest"


@pytest.mark.parametrize(
    "tensors",
    [
        (),
        (TensorSpec("a", "U8", (1,)), TensorSpec("a", "U8", (1,))),
        (TensorSpec("__metadata__", "U8", (1,)),),
        (TensorSpec("a?", "U8", (1,)),),
        (KV, dataclasses.replace(UNLIKE, shape=(3, 4))),
        tuple(TensorSpec(f"t{i:0100}", "U8", (1,)) for i in range(MAX_HEADER_BYTES // 140)),
        (TensorSpec("k", "U8", (2**70,)),),
    ],
    ids=["none", "twice", "reserved", "question mark", "blocks", "too many", "too large"],
)
def test_format_refuses(tensors: tuple[TensorSpec, ...]) -> None:
    with pytest.raises(ValueError, match=r"tensors|question mark|header of"):
        ChunkFormat(DIGEST, tensors, 0, "t0")


def test_seal_refuses() -> None:
    with pytest.raises(ValueError, match="place of"):
        FORMAT.seal(Place.of(bytearray(FORMAT.object_bytes - 1), FORMAT.header_bytes), HASH)
    with pytest.raises(ValueError, match="block hash"):
        FORMAT.seal(Place.of(bytearray(FORMAT.object_bytes), FORMAT.header_bytes), b"")
