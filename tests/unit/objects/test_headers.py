"""The parser of headers survives whatever it is given."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from s3kv.objects.headers import MAX_HEADER_BYTES, CodecError, read_header


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


@given(layers=json_values | st.dictionaries(st.just("t"), json_values))
def test_parser_survives_any_layers(layers: Any) -> None:
    metadata = {"coverage": "0", "block_hash": "ab", "first_block": "0", "blocks": "1"}
    metadata |= {"format": "2", "namespace": "", "shard": "", "algorithm": "", "digests": ""}
    said = {f"s3kv.{name}": value for name, value in metadata.items()}
    members = {
        "__metadata__": said | {"s3kv.layers": json.dumps(layers)},
        "t": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
    }
    text = json.dumps(members).encode()
    data = memoryview(len(text).to_bytes(8, "little") + text + bytes(1))
    if layers in ({}, {"t": []}):
        assert read_header(data).tensors[0].layers == ()
        return
    with pytest.raises(CodecError):
        read_header(data)
