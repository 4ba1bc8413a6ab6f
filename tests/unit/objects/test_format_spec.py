"""docs/object-format.md, carried out by a program that was written from it alone.

Above the line nothing of s3kv is used. Below it, the two have to agree byte by byte.
"""

from __future__ import annotations

import hashlib
import json
import re
from itertools import pairwise
from typing import Any, NamedTuple

import blake3
import pytest
import xxhash

SECRET = b"an example of a secret"
SIZES = {"BF16": 2, "F32": 4, "U8": 1, "F8_E4M3": 1}
SEGMENT_BYTES = 8_388_608


class Layer(NamedTuple):
    name: str
    dtype: str
    page: tuple[int, ...]
    order: str


class Tensor(NamedTuple):
    name: str
    dtype: str
    shape: tuple[int, ...]
    layers: tuple[Layer, ...] = ()

    @property
    def nbytes(self) -> int:
        count = SIZES[self.dtype]
        for size in self.shape:
            count *= size
        return count


class Expected(NamedTuple):
    """What a reader knows before it reads (5)."""

    prefix: str
    namespace: str
    coverage: int
    shard: str
    block_hash: bytes
    first_block: int
    blocks: int
    tensors: tuple[Tensor, ...]
    algorithm: str


def name_of(what: Expected) -> str:
    name = what.block_hash.hex()
    place = f"{what.prefix}/v2/{what.namespace}/{name[:2]}/{name}"
    return f"{place}/g{what.coverage}-{what.shard}.safetensors"


def namespace_of(fingerprint: dict[str, Any]) -> tuple[str, bytes]:
    """The namespace, and its manifest (2)."""
    canonical = json.dumps(
        fingerprint, sort_keys=True, separators=(",", ":"), allow_nan=False
    ).encode("ascii")
    return hashlib.sha256(canonical).hexdigest()[:32], canonical


def segments_of(what: Expected) -> list[list[tuple[int, int]]]:
    """By part, the begin and end of its segments in the payload (3)."""
    parts = []
    begin = 0
    for tensor in what.tensors:
        end = begin + tensor.nbytes
        cuts = [*range(begin, end, SEGMENT_BYTES), end]
        parts.append(list(pairwise(cuts)))
        begin = end
    return parts


def text_of(what: Expected, block_hash: str, digests: list[str]) -> str:
    layers = {
        t.name: [[n, d, list(p), o] for n, d, p, o in t.layers] for t in what.tensors if t.layers
    }
    metadata = {
        "s3kv.format": "2",
        "s3kv.namespace": what.namespace,
        "s3kv.coverage": str(what.coverage),
        "s3kv.shard": what.shard,
        "s3kv.block_hash": block_hash,
        "s3kv.first_block": str(what.first_block),
        "s3kv.blocks": str(what.blocks),
        "s3kv.layers": json.dumps(layers, separators=(",", ":")),
        "s3kv.algorithm": what.algorithm,
        "s3kv.digests": ",".join(digests),
    }
    members: dict[str, Any] = {"__metadata__": metadata}
    begin = 0
    for tensor in what.tensors:
        end = begin + tensor.nbytes
        members[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    return json.dumps(members, separators=(",", ":"))


def header_of(what: Expected, digests: list[str]) -> bytes:
    digits = {"xxh3-128": 32, "blake3-keyed": 64, "none": 0}[what.algorithm]
    count = sum(len(part) for part in segments_of(what)) if digits else 0
    longest = 8 + len(text_of(what, "0" * 128, ["0" * digits] * count))
    total = (longest + 4095) // 4096 * 4096
    text = text_of(what, what.block_hash.hex(), digests).encode("ascii")
    return (total - 8).to_bytes(8, "little") + text + b" " * (total - 8 - len(text))


def digest_of(what: Expected, number: int, segment: bytes) -> str:
    if what.algorithm == "xxh3-128":
        return xxhash.xxh3_128(segment, seed=0).hexdigest()
    covered = header_of(what, []) + number.to_bytes(8, "little") + segment
    return str(blake3.blake3(covered, key=key()).hexdigest())


def digests_of(what: Expected, payload: bytes) -> list[str]:
    if what.algorithm == "none":
        return []
    cuts = [cut for part in segments_of(what) for cut in part]
    return [digest_of(what, n, payload[begin:end]) for n, (begin, end) in enumerate(cuts)]


def key() -> bytes:
    context = "s3kv 2026-11 chunk integrity key"
    return bytes(blake3.blake3(SECRET, derive_key_context=context).digest())


def key_id() -> str:
    return str(blake3.blake3(b"s3kv key id", key=key()).hexdigest()[:16])


def write(what: Expected, payload: bytes) -> bytes:
    return header_of(what, digests_of(what, payload)) + payload


def accepts(what: Expected, data: bytes) -> bool:
    header_bytes = len(header_of(what, []))
    if len(data) != header_bytes + sum(t.nbytes for t in what.tensors):
        return False
    return data[:header_bytes] == header_of(what, digests_of(what, data[header_bytes:]))


# ------------------------------------------------------------------------------------------------
from s3kv.config import SECRET_VARIABLE, Config  # noqa: E402
from s3kv.objects.codec import ChunkFormat  # noqa: E402
from s3kv.objects.integrity import Integrity  # noqa: E402
from s3kv.objects.keys import Namespace, canonical_json, fingerprint_digest  # noqa: E402
from s3kv.place import Place  # noqa: E402
from s3kv.types import ChunkKey, TensorSpec  # noqa: E402
from scripts import format_example  # noqa: E402
from tests.project import ROOT  # noqa: E402

MODES = {"xxh3": "xxh3-128", "blake3-keyed": "blake3-keyed", "none": "none"}
SHARD = "h4-7of8-l0-31of32"
PAGE = (8, 16, 64)
TENSORS = (
    Tensor(
        "g0",
        "BF16",
        (4, 2, *PAGE),
        tuple(Layer(f"model.layers.{n}.self_attn.attn", "BF16", PAGE, "HNC") for n in range(2)),
    ),
    Tensor(
        "g1",
        "U8",
        (4, 140),
        (Layer("naïve", "F32", (3,), "C"), Layer("other", "F8_E4M3", (8, 16), "NC")),
    ),
    Tensor("large", "U8", (2 * SEGMENT_BYTES + 3,)),
)


def spec_of(layer: Layer) -> TensorSpec:
    return TensorSpec(layer.name, layer.dtype, layer.page, (), layer.order)


def specs_of(tensors: tuple[Tensor, ...]) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(t.name, t.dtype, t.shape, tuple(spec_of(layer) for layer in t.layers))
        for t in tensors
    )


@pytest.fixture(params=MODES)
def pair(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> tuple[Expected, ChunkFormat]:
    """The same object as the page and as s3kv have it."""
    monkeypatch.setenv(SECRET_VARIABLE, SECRET.decode())
    mode = request.param
    integrity = Integrity.of(Config(bucket="b2", integrity=mode))
    digest = "0123456789abcdef" * 2
    ours = ChunkFormat(digest, specs_of(TENSORS), 0, SHARD, integrity, 3)
    block_hash = bytes(range(7, 39))
    theirs = Expected("team/s3kv", digest, 0, SHARD, block_hash, 3, 4, TENSORS, MODES[mode])
    return theirs, ours


def payload_of(what: Expected) -> bytes:
    nbytes = sum(t.nbytes for t in what.tensors)
    return (bytes(i * 7 % 251 for i in range(251)) * (nbytes // 251 + 1))[:nbytes]


def sealed(ours: ChunkFormat, block_hash: bytes, payload: bytes) -> bytes:
    buffer = memoryview(bytearray(ours.object_bytes))
    buffer[ours.header_bytes :] = payload
    ours.seal(Place.of(buffer, ours.header_bytes), block_hash)
    return bytes(buffer)


def test_both_write_the_same_bytes(pair: tuple[Expected, ChunkFormat]) -> None:
    theirs, ours = pair
    payload = payload_of(theirs)
    assert write(theirs, payload) == sealed(ours, theirs.block_hash, payload)


def test_both_refuse_the_same(pair: tuple[Expected, ChunkFormat]) -> None:
    theirs, ours = pair
    good = write(theirs, payload_of(theirs))
    other = write(theirs._replace(block_hash=b"another"), payload_of(theirs))
    window = write(theirs._replace(first_block=2), payload_of(theirs))
    flipped = bytearray(good)
    flipped[len(good) // 2] ^= 1
    for data in (good, other, window, bytes(flipped), good[:-1], good + b"\0"):
        refused = (
            ours.check(Place.of(data, ours.header_bytes), len(data), theirs.block_hash) is not None
        )
        assert refused == (not accepts(theirs, data))
    assert accepts(theirs, good)
    assert not accepts(theirs, other)


def test_names_are_the_same(pair: tuple[Expected, ChunkFormat]) -> None:
    theirs, ours = pair
    place = Namespace(theirs.prefix, theirs.namespace)
    assert name_of(theirs) == place.chunk(ChunkKey(0, theirs.block_hash), ours.shard)


def test_namespaces_are_the_same() -> None:
    fingerprint = {"b": [1, None, {"z": True, "a": "é"}], "a": {"rope": 1.5}}
    namespace, manifest = namespace_of(fingerprint)
    assert namespace == fingerprint_digest(fingerprint)
    assert manifest == canonical_json(fingerprint)


def test_the_identity_of_the_key_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, SECRET.decode())
    integrity = Integrity.of(Config(bucket="b2", integrity="blake3-keyed"))
    assert integrity.identity()["key_id"] == key_id()


def test_the_example_of_the_page_is_one() -> None:
    page = (ROOT / "docs" / "object-format.md").read_text()
    name, header = re.findall(r"```text\n(.*?)\n```", page, re.DOTALL)
    tensors = tuple(
        Tensor(
            t.name,
            t.dtype,
            t.shape,
            tuple(Layer(x.name, x.dtype, x.shape, x.order) for x in t.layers),
        )
        for t in format_example.TENSORS
    )
    chunk, block_hash = format_example.CHUNK, bytes(range(32))
    what = Expected(
        *("s3kv", chunk.namespace_digest, 1, "h0-3of8-l0-2of3", block_hash),
        *(14, 2, tensors, "xxh3-128"),
    )
    assert name == name_of(what)
    payload = bytes(range(sum(t.nbytes for t in tensors)))
    data = write(what, payload)
    assert data == bytes(format_example.example())
    assert data[8:4096].decode().rstrip() == header.replace("\n", "")
    assert (len(data), int.from_bytes(data[:8], "little")) == (4162, 4088)
    assert "object of 4,162 bytes: N is 4,088" in page
