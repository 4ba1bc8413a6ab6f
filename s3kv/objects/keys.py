"""Object keys. Only this module builds and parses them.

    {prefix}/v3/{namespace digest}/{hh}/{block hash}/g{coverage}-{shard}.safetensors
    {prefix}/v3/{namespace digest}/{hh}/{name}/g{coverage}-{shard}.encrypted.safetensors
    {prefix}/v3/{namespace digest}/shapes/{shard}
    {prefix}/v3/{namespace digest}/manifest.json
    {prefix}/v3/cleaner.json

`v3` is the version of this layout and of the object format. `hh` is the first byte of the block
hash: hashes are uniform, so the store can split the namespace into partitions right after the
digest, and a tool can walk it in 256 parallel listings. All shards and coverages of one block hash
are neighbours. The name of an encrypted object is computed from the hash
(`encryption`). A shard names the KV heads and layers an object holds; the empty objects under
`shapes/` list the shards of a namespace. A change here orphans every object already written; the
golden tests make sure that it is deliberate.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from s3kv.objects.shards import Shard
from s3kv.types import ChunkKey

LAYOUT = "v3"
WHOLE = "whole"
"""The shard of an object that is not divided among ranks: an item, or a block of the library."""
DIGEST_CHARS = 32
"""128 bits of the SHA-256: a collision of two models' namespaces is out of reach."""
MAX_HASH_BYTES = 64
"""Longest block hash accepted; vLLM's are 16 (xxh3) or 32 (SHA-256) bytes."""


def checked_key(group: int, content_hash: object) -> ChunkKey:
    """The key for a hash from a caller. A subclass of `bytes`, as numpy's, is converted to `bytes`,
    because messages cannot carry it. Raises `TypeError` for another type (a bytearray or memoryview
    may change later), and `ValueError` for a wrong length."""
    if not isinstance(content_hash, bytes):
        kind = type(content_hash).__name__
        raise TypeError(f"the hash is of type {kind}: allowed is bytes, such as a digest()")
    plain = bytes(content_hash)
    if not 1 <= len(plain) <= MAX_HASH_BYTES:
        raise ValueError(f"the hash has {len(plain)} bytes: allowed are 1 to {MAX_HASH_BYTES}")
    return ChunkKey(group, plain)


_DIGEST = re.compile(rf"[0-9a-f]{{{DIGEST_CHARS}}}")
_SHARD = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*")
_NAMESPACE = rf"(?P<prefix>[^/](?:.*[^/])?)/{LAYOUT}/(?P<digest>{_DIGEST.pattern})"
_CHUNK = re.compile(
    rf"{_NAMESPACE}/(?P<hh>[0-9a-f]{{2}})"
    rf"/(?P<hash>(?P=hh)(?:[0-9a-f]{{2}}){{0,{MAX_HASH_BYTES - 1}}})"
    rf"/g(?P<coverage>0|[1-9][0-9]{{0,8}})-(?P<shard>{_SHARD.pattern})"
    r"(?P<encrypted>\.encrypted)?\.safetensors",
    re.DOTALL,
)
_SIGN = re.compile(rf"{_NAMESPACE}/(?:manifest\.json|shapes/{_SHARD.pattern})", re.DOTALL)


def shard_name(
    heads: int,
    total_heads: int,
    layers: range,
    total_layers: int,
    *,
    tp_rank: int,
    tp_size: int,
    replicas: int = 1,
) -> str:
    """The shard of one rank: which KV heads and layers it holds, as in "h0-3of8-l0-15of32".

    heads: on one rank. total_heads: of the model, 1 for MLA. layers: the rank's, of `total_layers`.
    replicas: number of consecutive ranks whose KV is known to be equal; they share one name. Other
    ranks that hold the same heads have different names, which end in "-r{n}of{m}".
    """
    same_heads = max(1, heads * tp_size // total_heads)
    copies, odd = divmod(same_heads, replicas)
    if odd:
        copies, replicas = same_heads, 1
    place, copy = tp_rank // same_heads, tp_rank % same_heads // replicas
    first, of = place * heads, -(-tp_size // same_heads) * heads
    return Shard(range(first, first + heads), of, layers, total_layers, copy, copies).name


def fingerprint_digest(fingerprint: Mapping[str, Any]) -> str:
    """Digest of a fingerprint: SHA-256 over its canonical JSON, the first 32 hex digits.

    Canonical: keys sorted at every depth, no white space, ASCII with escapes. Raises `ValueError`
    or `TypeError` if it holds anything but JSON values with text keys (JSON has no NaN), because
    two fingerprints must never become equal by conversion.
    """
    _require_text_keys(fingerprint)
    return hashlib.sha256(canonical_json(fingerprint)).hexdigest()[:DIGEST_CHARS]


def canonical_json(value: Mapping[str, Any]) -> bytes:
    """The bytes that `fingerprint_digest` hashes and the manifest object holds."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def _require_text_keys(value: Any) -> None:
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"fingerprint key {key!r} is not text: JSON would convert it")
            _require_text_keys(item)
    elif isinstance(value, list | tuple):
        for item in value:
            _require_text_keys(item)


@dataclass(frozen=True, slots=True)
class Namespace:
    """All chunks of one model, one layout and one world shape.

    prefix: the setting of that name, no slash at either end.
    digest: `fingerprint_digest` of everything that changes the bytes or their meaning.
    Raises `ValueError` if either cannot be part of a key.
    """

    prefix: str
    digest: str

    def __post_init__(self) -> None:
        if not self.prefix or self.prefix != self.prefix.strip("/"):
            raise ValueError(f"prefix {self.prefix!r} is empty or has a slash at an end")
        if _DIGEST.fullmatch(self.digest) is None:
            raise ValueError(f"digest {self.digest!r} is not {DIGEST_CHARS} lower-case hex digits")

    @property
    def root(self) -> str:
        """Prefix of every key of this namespace; ends with a slash, for listings."""
        return f"{self.prefix}/{LAYOUT}/{self.digest}/"

    @property
    def shapes(self) -> str:
        """Prefix of the empty objects that `shape` names."""
        return f"{self.root}shapes/"

    @property
    def manifest(self) -> str:
        """Key of the object that spells out the fingerprint."""
        return f"{self.root}manifest.json"

    def shape(self, shard: str) -> str:
        """Key of the empty object that lists this shard for the namespace. Raises
        `ValueError` as `chunk` does."""
        return f"{self.shapes}{_checked(shard)}"

    def chunk(self, key: ChunkKey, shard: str, *, is_encrypted: bool = False) -> str:
        """Key of one shard of a chunk; of an encrypted one, with its name in the place of the hash.

        shard: lower-case letters, digits and single hyphens, such as "h0-3of8-l0-31of32". Raises
        `ValueError` for anything that `parse` could not read back.
        """
        if not 1 <= len(key.block_hash) <= MAX_HASH_BYTES:
            raise ValueError(f"block hash of {len(key.block_hash)} bytes: 1 to {MAX_HASH_BYTES}")
        if not 0 <= key.group < 10**9:
            raise ValueError(f"group {key.group} is out of range")
        name = key.block_hash.hex()
        form = ".encrypted" if is_encrypted else ""
        return f"{self.root}{name[:2]}/{name}/g{key.group}-{_checked(shard)}{form}.safetensors"


def _checked(shard: str) -> str:
    if _SHARD.fullmatch(shard) is None:
        raise ValueError(f"shard {shard!r}: allowed is a text such as 'h0-3of8-l0-31of32'")
    return shard


@dataclass(frozen=True, slots=True)
class ChunkAddress:
    """The parts of a chunk's key. is_encrypted: `block_hash` is the name of an encrypted object."""

    namespace: Namespace
    key: ChunkKey
    shard: str
    is_encrypted: bool = False


def parse(key: str) -> ChunkAddress | None:
    """Inverse of `Namespace.chunk`; None for a key that it could not have built."""
    match = _CHUNK.fullmatch(key)
    if match is None:
        return None
    namespace = Namespace(match["prefix"], match["digest"])
    chunk = ChunkKey(int(match["coverage"]), bytes.fromhex(match["hash"]))
    return ChunkAddress(namespace, chunk, match["shard"], match["encrypted"] is not None)


def parse_sign(key: str) -> Namespace | None:
    """The namespace that this key is the manifest or a shape of; None for any other key."""
    match = _SIGN.fullmatch(key)
    return match and Namespace(match["prefix"], match["digest"])


def cleaner(prefix: str) -> str:
    """Key of the lease of the cleaner, which keeps everything under `prefix` to its budget."""
    return f"{all_namespaces(prefix)}cleaner.json"


def all_namespaces(prefix: str) -> str:
    """Prefix of every key under `prefix`, of all namespaces; for tools that walk them all."""
    return f"{prefix}/{LAYOUT}/"
