from __future__ import annotations

import dataclasses
import json
import pickle
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from s3kv.objects.codec import (
    ALIGN_BYTES,
    MAX_HEADER_BYTES,
    ChunkFormat,
    CodecError,
    read_header,
)
from s3kv.types import TensorSpec
from tests.objects.suite import pattern

DIGEST = "0123456789abcdef0123456789abcdef"
HASH = bytes(range(32))
FORMAT = ChunkFormat(
    DIGEST,
    (
        TensorSpec("layers.0.kv", "BF16", (2, 3, 4)),
        TensorSpec("layers.10.kv", "F32", (5,)),
        TensorSpec("layers.2.scale", "U8", ()),
    ),
    1,
    "t0of2-p0of1",
)
SEALED_HEADER_JSON = (
    '{"__metadata__":{"s3kv.format":"1","s3kv.namespace":"0123456789abcdef0123456789abcdef",'
    '"s3kv.group":"1","s3kv.shard":"t0of2-p0of1","s3kv.block_hash":'
    '"000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f",'
    '"s3kv.algorithm":"xxh3-128","s3kv.digest":"%s"},'
    '"layers.0.kv":{"dtype":"BF16","shape":[2,3,4],"data_offsets":[0,48]},'
    '"layers.10.kv":{"dtype":"F32","shape":[5],"data_offsets":[48,68]},'
    '"layers.2.scale":{"dtype":"U8","shape":[],"data_offsets":[68,69]}}'
)


def sealed(chunk_format: ChunkFormat = FORMAT, block_hash: bytes = HASH) -> memoryview:
    buffer = memoryview(bytearray(chunk_format.object_bytes))
    buffer[chunk_format.header_bytes :] = pattern(chunk_format.payload_bytes, 1)
    chunk_format.seal(buffer, block_hash)
    return buffer


def check(buffer: memoryview | bytes, chunk_format: ChunkFormat = FORMAT) -> str | None:
    view = memoryview(buffer)
    return chunk_format.check(view, len(view), HASH)


def test_golden_object() -> None:
    """These bytes are on buckets. A change needs a new format version."""
    payload = bytes(pattern(69, 1))
    digest = xxhash.xxh3_128_hexdigest(payload)
    assert digest == "6ffe9083f6f18743ceab0cbb0eeef208"
    expected = (4088).to_bytes(8, "little") + (SEALED_HEADER_JSON % digest).encode().ljust(4088)
    assert bytes(sealed()) == expected + payload


def test_safetensors_reads_it(tmp_path: Any) -> None:
    data = bytes(sealed())
    payload = data[FORMAT.header_bytes :]
    tensors = safetensors.torch.load(data)
    assert sorted(tensors) == sorted(t.name for t in FORMAT.tensors)
    expected = torch.frombuffer(bytearray(payload[48:68]), dtype=torch.float32)
    assert torch.equal(tensors["layers.10.kv"].view(torch.int32), expected.view(torch.int32))
    assert tensors["layers.0.kv"].shape == (2, 3, 4)
    assert tensors["layers.0.kv"].dtype == torch.bfloat16
    (tmp_path / "chunk").write_bytes(data)
    with safetensors.safe_open(tmp_path / "chunk", framework="pt") as file:
        assert file.metadata()["s3kv.block_hash"] == HASH.hex()
        assert file.get_tensor("layers.2.scale").item() == payload[68]


@pytest.mark.parametrize("hash_bytes", [1, 16, 32, 64])
def test_header_has_one_length_for_all_hashes(hash_bytes: int) -> None:
    block_hash = bytes(hash_bytes)
    buffer = sealed(block_hash=block_hash)
    assert FORMAT.header_bytes % ALIGN_BYTES == 0
    assert FORMAT.check(buffer, len(buffer), block_hash) is None
    assert read_header(buffer).header_bytes == FORMAT.header_bytes


@given(layers=st.integers(1, 200))
def test_header_is_aligned_for_any_number_of_layers(layers: int) -> None:
    tensors = tuple(TensorSpec(f"model.layers.{i}.kv", "U8", (1,)) for i in range(layers))
    chunk_format = ChunkFormat(DIGEST, tensors, 0, "t0")
    assert chunk_format.header_bytes % ALIGN_BYTES == 0
    buffer = sealed(chunk_format)
    assert check(buffer, chunk_format) is None
    assert len(safetensors.torch.load(bytes(buffer))) == layers


def test_round_trip_by_parser() -> None:
    header = read_header(sealed())
    assert header.tensors == FORMAT.tensors
    assert (header.namespace_digest, header.group, header.shard) == (DIGEST, 1, "t0of2-p0of1")
    assert (header.block_hash, header.version, header.algorithm) == (HASH, "1", "xxh3-128")
    assert header.payload_bytes == FORMAT.payload_bytes


def test_header_alone_can_be_read() -> None:
    buffer = sealed()
    header = read_header(buffer[: FORMAT.header_bytes], object_bytes=len(buffer))
    assert header == read_header(buffer)


def test_every_single_damaged_byte_is_refused() -> None:
    buffer = sealed()
    for at in range(len(buffer)):
        buffer[at] ^= 0x01
        assert check(buffer) is not None, at
        buffer[at] ^= 0x01
    assert check(buffer) is None


@given(at=st.integers(0, FORMAT.object_bytes - 1), value=st.integers(0, 255))
def test_any_other_value_of_any_byte_is_refused(at: int, value: int) -> None:
    buffer = sealed()
    same = buffer[at] == value
    buffer[at] = value
    assert (check(buffer) is None) == same


@given(nbytes=st.integers(0, 2 * FORMAT.object_bytes))
def test_any_other_length_is_refused(nbytes: int) -> None:
    data = (bytes(sealed()) * 2)[:nbytes]
    assert check(data) == (None if nbytes == FORMAT.object_bytes else "length")


def test_length_beyond_the_buffer_is_refused() -> None:
    buffer = sealed()
    assert FORMAT.check(buffer, len(buffer) + 1, HASH) == "length"
    assert FORMAT.check(buffer[:-1], len(buffer), HASH) == "length"


@given(block_hash=st.binary(min_size=1, max_size=64))
def test_foreign_hash_is_refused(block_hash: bytes) -> None:
    buffer = sealed(block_hash=block_hash)
    assert check(buffer) == (None if block_hash == HASH else "block_hash")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"namespace_digest": "f" * 32}, "namespace"),
        ({"group": 2}, "group"),
        ({"shard": "t1of2-p0of1"}, "shard"),
        ({"tensors": (*FORMAT.tensors[:2], TensorSpec("other", "U8", ()))}, "tensors"),
        ({"tensors": (TensorSpec("layers.0.kv", "U8", (69,)),)}, "tensors"),
        ({"tensors": (TensorSpec("a", "U8", (68,)),)}, "length"),
    ],
)
def test_foreign_format_is_refused(change: dict[str, Any], reason: str) -> None:
    assert check(sealed(dataclasses.replace(FORMAT, **change))) == reason


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (b'"s3kv.format":"1"', b'"s3kv.format":"2"', "version"),
        (b'xxh3-128"', b'xxh3-64" ', "algorithm"),
        (b"layers.0.kv", b"layers.1.kv", "tensors"),
        (b"[2,3,4]", b"[3,2,4]", "tensors"),
        (b"}} ", b"} }", "header"),
        (b"__metadata__", b"__mitadata__", "header"),
    ],
)
def test_altered_header_is_refused(old: bytes, new: bytes, reason: str) -> None:
    data = bytes(sealed())
    assert data.count(old) == 1
    assert check(data.replace(old, new)) == reason


def test_damaged_payload_is_told_from_a_foreign_object() -> None:
    buffer = sealed()
    buffer[-1] ^= 0x80
    assert check(buffer) == "digest"


def test_format_is_plain_data() -> None:
    copy = pickle.loads(pickle.dumps(FORMAT))
    assert copy == FORMAT
    assert check(sealed(), copy) is None
    fields = [getattr(FORMAT, f.name) for f in dataclasses.fields(FORMAT) if f.init]
    assert ChunkFormat(*fields) == FORMAT


@pytest.mark.parametrize(
    "tensors",
    [
        (),
        (TensorSpec("a", "U8", (1,)), TensorSpec("a", "U8", (1,))),
        (TensorSpec("__metadata__", "U8", (1,)),),
        (TensorSpec("a?", "U8", (1,)),),
        tuple(TensorSpec(f"t{i:0100}", "U8", (1,)) for i in range(MAX_HEADER_BYTES // 140)),
    ],
    ids=["none", "twice", "reserved", "question mark", "too many"],
)
def test_format_refuses(tensors: tuple[TensorSpec, ...]) -> None:
    with pytest.raises(ValueError, match=r"tensors|question mark|header of"):
        ChunkFormat(DIGEST, tensors, 0, "t0")


def test_seal_refuses() -> None:
    with pytest.raises(ValueError, match="buffer of"):
        FORMAT.seal(memoryview(bytearray(FORMAT.object_bytes - 1)), HASH)
    with pytest.raises(ValueError, match="block hash"):
        FORMAT.seal(memoryview(bytearray(FORMAT.object_bytes)), b"")


@given(st.binary(max_size=200))
def test_parser_survives_any_bytes(data: bytes) -> None:
    with pytest.raises(CodecError):
        read_header(memoryview(data))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
)


@given(
    entry=st.fixed_dictionaries(
        {}, optional={"dtype": json_values, "shape": json_values, "data_offsets": json_values}
    ),
    metadata=json_values,
)
def test_parser_survives_any_json(entry: Any, metadata: Any) -> None:
    text = json.dumps({"__metadata__": metadata, "t": entry}).encode()
    with pytest.raises(CodecError):
        read_header(memoryview(len(text).to_bytes(8, "little") + text + bytes(8)))


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 100_000,
        b"1" * 100_000,
        b'{"t":1,"t":1}',
        b"[]",
        b"\xff\xfe",
        b'{"__metadata__":{},"t":{"dtype":"U8","shape":['
        + b"7," * 20
        + b'7],"data_offsets":[0,1]}}',
    ],
    ids=["deep", "long number", "twice", "no object", "no text", "many dimensions"],
)
def test_parser_has_limits(text: bytes) -> None:
    with pytest.raises(CodecError):
        read_header(memoryview(len(text).to_bytes(8, "little") + text + bytes(8)))


@pytest.mark.parametrize("announced", [2**64 - 1, 2**63, MAX_HEADER_BYTES, MAX_HEADER_BYTES - 7])
def test_parser_does_not_believe_lengths(announced: int) -> None:
    data = announced.to_bytes(8, "little") + b" " * (2 * MAX_HEADER_BYTES)
    with pytest.raises(CodecError, match="header of"):
        read_header(memoryview(data))
