from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from s3kv.objects.keys import (
    ChunkAddress,
    Namespace,
    all_namespaces,
    fingerprint_digest,
    parse,
    parse_sign,
    shard_name,
)
from s3kv.types import ChunkKey

DIGEST = "0123456789abcdef0123456789abcdef"
HASH = bytes.fromhex("ab" + "00" * 30 + "ff")


def test_golden() -> None:
    """These strings are on buckets. A change orphans all of them: it needs a new layout version."""
    namespace = Namespace("team-a/s3kv", DIGEST)
    assert namespace.root == "team-a/s3kv/v3/0123456789abcdef0123456789abcdef/"
    assert namespace.manifest == "team-a/s3kv/v3/0123456789abcdef0123456789abcdef/manifest.json"
    assert namespace.chunk(ChunkKey(0, HASH), "h0-3of8-l0-31of32") == (
        "team-a/s3kv/v3/0123456789abcdef0123456789abcdef/ab/"
        "ab000000000000000000000000000000000000000000000000000000000000ff/"
        "g0-h0-3of8-l0-31of32.safetensors"
    )
    assert all_namespaces("team-a/s3kv") == "team-a/s3kv/v3/"


@pytest.mark.parametrize(
    "value", [{1: "a"}, {"a": {None: 1}}, {"a": [{True: 1}]}, {"a": float("nan")}, {"a": b"b"}]
)
def test_fingerprint_refuses_what_json_would_convert(value: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError)):
        fingerprint_digest(value)


@given(
    prefix=st.from_regex(r"[^/](.*[^/])?", fullmatch=True).filter(lambda p: p.strip("/") == p),
    digest=st.from_regex(r"[0-9a-f]{32}", fullmatch=True),
    group=st.integers(0, 10**9 - 1),
    block_hash=st.binary(min_size=1, max_size=64),
    shard=st.from_regex(r"[a-z0-9]+(-[a-z0-9]+)*", fullmatch=True),
)
def test_parse_is_the_inverse(
    prefix: str, digest: str, group: int, block_hash: bytes, shard: str
) -> None:
    address = ChunkAddress(Namespace(prefix, digest), ChunkKey(group, block_hash), shard)
    key = address.namespace.chunk(address.key, shard)
    assert key.startswith(address.namespace.root)
    assert parse(key) == address


@pytest.mark.parametrize(
    "key",
    [
        "",
        f"s3kv/v3/{DIGEST}/manifest.json",
        f"s3kv/v1/{DIGEST}/ab/abcd/g0-t0.safetensors",
        f"s3kv/v3/{DIGEST}/cd/abcd/g0-t0.safetensors",
        f"s3kv/v3/{DIGEST}/ab/abc/g0-t0.safetensors",
        f"s3kv/v3/{DIGEST}/ab/ABCD/g0-t0.safetensors",
        f"s3kv/v3/{DIGEST}/ab/abcd/g00-t0.safetensors",
        f"s3kv/v3/{DIGEST}/ab/abcd/g0-t0.safetensors\n",
        f"s3kv/v3/{DIGEST[1:]}/ab/abcd/g0-t0.safetensors",
        f"/s3kv/v3/{DIGEST}/ab/abcd/g0-t0.safetensors",
        f"s3kv/v3/{DIGEST}/ab/" + "ab" * 65 + "/g0-t0.safetensors",
    ],
)
def test_parse_knows_what_it_did_not_build(key: str) -> None:
    assert parse(key) is None


@pytest.mark.parametrize(
    ("key", "shard"),
    [
        (ChunkKey(0, b""), "t0"),
        (ChunkKey(0, b"x" * 65), "t0"),
        (ChunkKey(-1, b"x"), "t0"),
        (ChunkKey(10**9, b"x"), "t0"),
        (ChunkKey(0, b"x"), ""),
        (ChunkKey(0, b"x"), "t0/p0"),
        (ChunkKey(0, b"x"), "-t0"),
        (ChunkKey(0, b"x"), "t0\n"),
    ],
)
def test_chunk_refuses_what_parse_could_not_give_back(key: ChunkKey, shard: str) -> None:
    with pytest.raises(ValueError, match=r"hash|group|shard"):
        Namespace("s3kv", DIGEST).chunk(key, shard)


@pytest.mark.parametrize(
    ("prefix", "digest"),
    [("", DIGEST), ("/a", DIGEST), ("a/", DIGEST), ("a", "0" * 31), ("a", "G" * 32)],
)
def test_namespace_refuses(prefix: str, digest: str) -> None:
    with pytest.raises(ValueError, match=r"prefix|digest"):
        Namespace(prefix, digest)


def test_a_manifest_and_a_shape_are_known_by_their_keys() -> None:
    namespace = Namespace("team/s3kv", "a" * 32)
    assert parse_sign(namespace.manifest) == namespace
    assert parse_sign(namespace.shape("h0-3of8-l0-31of32")) == namespace
    for key in ("team/s3kv/v3/manifest.json", "/s3kv/v3/" + "a" * 32 + "/manifest.json"):
        assert parse_sign(key) is None
    assert parse_sign(namespace.manifest + "x") is None
    assert parse(namespace.manifest) is None


def names(
    heads: int, total: int, size: int, layers: range = range(32), replicas: int = 1
) -> list[str]:
    return [
        shard_name(heads, total, layers, 32, tp_rank=rank, tp_size=size, replicas=replicas)
        for rank in range(size)
    ]


@pytest.mark.parametrize(
    ("ranks", "heads"),
    [
        ((8, 8, 1), ["h0-7of8"]),
        ((4, 8, 2), ["h0-3of8", "h4-7of8"]),
        # Ranks that hold the same heads have names of their own, unless they are known to be equal.
        ((1, 1, 2), ["h0-0of1 r0of2", "h0-0of1 r1of2"]),
        ((1, 2, 4), ["h0-0of2 r0of2", "h0-0of2 r1of2", "h1-1of2 r0of2", "h1-1of2 r1of2"]),
        ((1, 1, 2, 2), ["h0-0of1"] * 2),
        ((1, 2, 4, 2), ["h0-0of2"] * 2 + ["h1-1of2"] * 2),
        ((1, 1, 4, 2), ["h0-0of1 r0of2"] * 2 + ["h0-0of1 r1of2"] * 2),
        # Ranks with other heads never have one name, whatever is said of them.
        ((4, 8, 2, 2), ["h0-3of8", "h4-7of8"]),
    ],
)
def test_a_shard_is_named_by_its_heads_and_layers(ranks: Any, heads: list[str]) -> None:
    for layers, name in ((range(32), "l0-31of32"), (range(16, 32), "l16-31of32")):
        found = names(*ranks[:3], layers, *ranks[3:])
        parts = [head.partition(" ") for head in heads]
        assert found == [f"{h}-{name}{'-' if copy else ''}{copy}" for h, _, copy in parts]


@given(heads=st.integers(1, 64), total=st.integers(1, 64), size=st.integers(1, 64))
def test_no_two_ranks_have_one_name(heads: int, total: int, size: int) -> None:
    """Whatever a model says of its heads."""
    assert len(set(names(1, 3, 6, replicas=3))) == 6
    found = names(heads, total, size)
    assert len(set(found)) == size
    for name in found:
        Namespace("s3kv", DIGEST).shape(name)
