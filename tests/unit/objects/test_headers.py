"""The parser of headers survives whatever it is given."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from s3kv.objects.headers import MAX_HEADER_BYTES, CodecError, read_header
from s3kv.types import TensorSpec


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
        b"[]",
        b"\xff\xfe",
        b'{"__metadata__":{},"t":{"dtype":"U8","shape":['
        + b"7," * 20
        + b'7],"data_offsets":[0,1]}}',
    ],
    ids=["deep", "long number", "no object", "no text", "many dimensions"],
)
def test_parser_has_limits(text: bytes) -> None:
    with pytest.raises(CodecError):
        read_header(memoryview(len(text).to_bytes(8, "little") + text + bytes(8)))


@pytest.mark.parametrize("announced", [2**64 - 1, 2**63, MAX_HEADER_BYTES, MAX_HEADER_BYTES - 7])
def test_parser_does_not_believe_lengths(announced: int) -> None:
    data = announced.to_bytes(8, "little") + b" " * (2 * MAX_HEADER_BYTES)
    with pytest.raises(CodecError, match="header of"):
        read_header(memoryview(data))


METADATA = {
    **{"format": "3", "namespace": "", "coverage": "0", "shard": "", "block_hash": "ab"},
    **{"first_block": "0", "blocks": "1", "layers": "{}", "algorithm": "", "digests": ""},
}
ONE_BYTE = {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}


def one_byte(name: str, **metadata: str) -> memoryview:
    said = {f"s3kv.{name}": value for name, value in (METADATA | metadata).items()}
    text = json.dumps({"__metadata__": said, name: ONE_BYTE}).encode()
    return memoryview(len(text).to_bytes(8, "little") + text + bytes(1))


@given(layers=json_values | st.dictionaries(st.just("t"), json_values))
def test_parser_survives_any_layers(layers: Any) -> None:
    data = one_byte("t", layers=json.dumps(layers))
    if layers in ({}, {"t": []}):
        assert read_header(data).tensors[0].layers == ()
        return
    with pytest.raises(CodecError):
        read_header(data)


@given(tensors=json_values | st.dictionaries(st.just("t"), json_values))
def test_parser_survives_any_tensors_of_a_compressed_object(tensors: Any) -> None:
    data = one_byte("segments", codec="blosc2", tensors=json.dumps(tensors))
    if tensors == {}:
        assert read_header(data).tensors == ()
        return
    with pytest.raises(CodecError):
        read_header(data)


def test_a_compressed_object_has_the_tensors_that_it_decodes_to() -> None:
    entries = {
        "g0": {"dtype": "BF16", "shape": [2, 1, 3], "data_offsets": [0, 12]},
        "g1": {"dtype": "U8", "shape": [5], "data_offsets": [12, 17]},
    }
    layers = json.dumps({"g0": [["layer", "BF16", [3], "C"]]})
    told = {"codec": "blosc2", "tensors": json.dumps(entries), "layers": layers}
    header = read_header(one_byte("segments", **told))
    layer = TensorSpec("layer", "BF16", (3,), (), "C")
    assert header.tensors == (
        TensorSpec("g0", "BF16", (2, 1, 3), (layer,)),
        TensorSpec("g1", "U8", (5,)),
    )
    assert (header.codec, header.payload_bytes) == ("blosc2", 1)
    assert read_header(one_byte("t")).codec == ""
    gap = json.dumps(entries | {"g1": {**entries["g1"], "data_offsets": [13, 18]}})
    for changes in ({"tensors": gap}, {"tensors": ""}, {"layers": '{"g2":[]}'}):
        with pytest.raises(CodecError) as caught:
            read_header(one_byte("segments", **told | changes))
        assert caught.value.refusal == "header"


@pytest.mark.parametrize("codec", ["", "blosc2"])
def test_an_object_shorter_or_longer_than_it_says_is_of_the_wrong_length(codec: str) -> None:
    data = one_byte("segments", codec=codec, tensors="{}")
    for nbytes in (len(data) - 1, len(data) + 1):
        with pytest.raises(CodecError, match="tensors of 1 bytes in a payload") as caught:
            read_header(data, object_bytes=nbytes)
        assert caught.value.refusal == "length"
