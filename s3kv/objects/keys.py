"""Object keys: the only place that builds them, and the only place that reads them.

    {prefix}/v1/{namespace digest}/{hh}/{block hash}/g{group}-{shard}.safetensors
    {prefix}/v1/{namespace digest}/manifest.json

`v1` is the version of this layout and of the object format. `hh` is the first byte of the block
hash: hashes are uniform, so the store can split the namespace into partitions right behind the
digest, and a tool can walk it in 256 parallel listings. All shards and groups of one block hash
lie side by side. Changing anything here orphans every object already written; the golden tests
are there to make that a decision.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from s3kv.types import ChunkKey

LAYOUT = "v1"
DIGEST_CHARS = 32
"""128 bits of the SHA-256: a collision between two models' namespaces stays out of reach."""
MAX_HASH_BYTES = 64
"""Longest block hash taken; vLLM's are 16 (xxh3) or 32 (SHA-256) bytes."""

_DIGEST = re.compile(rf"[0-9a-f]{{{DIGEST_CHARS}}}")
_SHARD = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*")
_CHUNK = re.compile(
    rf"(?P<prefix>.+)/{LAYOUT}/(?P<digest>{_DIGEST.pattern})/(?P<hh>[0-9a-f]{{2}})"
    rf"/(?P<hash>(?:[0-9a-f]{{2}}){{1,{MAX_HASH_BYTES}}})"
    rf"/g(?P<group>0|[1-9][0-9]{{0,8}})-(?P<shard>{_SHARD.pattern})\.safetensors",
    re.DOTALL,
)
_MANIFEST = re.compile(
    rf"(?P<prefix>.+)/{LAYOUT}/(?P<digest>{_DIGEST.pattern})/manifest\.json", re.DOTALL
)


def fingerprint_digest(fingerprint: Mapping[str, Any]) -> str:
    """Digest of a fingerprint: SHA-256 over its canonical JSON, the first 32 hex digits.

    Canonical: keys sorted at every depth, no white space, ASCII with escapes. Raises `ValueError`
    or `TypeError` when it holds anything but JSON values with text keys (NaN included: it has no
    JSON), because two fingerprints must never become equal by conversion.
    """
    _require_text_keys(fingerprint)
    return hashlib.sha256(canonical_json(fingerprint)).hexdigest()[:DIGEST_CHARS]


def canonical_json(value: Mapping[str, Any]) -> bytes:
    """The bytes `fingerprint_digest` hashes, and the manifest object holds."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode("ascii")


def _require_text_keys(value: Any) -> None:
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"fingerprint key {key!r} is no text: JSON would convert it")
            _require_text_keys(item)
    elif isinstance(value, list | tuple):
        for item in value:
            _require_text_keys(item)


@dataclass(frozen=True, slots=True)
class Namespace:
    """All chunks that mean the same thing: one model, one layout, one world shape.

    prefix: the setting of that name, no slash at either end.
    digest: `fingerprint_digest` of everything that changes the bytes or their meaning.
    Raises `ValueError` when either cannot be part of a key.
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
        """What every key of this namespace starts with; ends with a slash, so it is listable."""
        return f"{self.prefix}/{LAYOUT}/{self.digest}/"

    @property
    def manifest(self) -> str:
        """Key of the object that spells out the fingerprint."""
        return f"{self.root}manifest.json"

    def chunk(self, key: ChunkKey, shard: str) -> str:
        """Key of one rank's part of a chunk.

        shard: lower-case letters, digits and single hyphens, such as "t0of2-p0of1". Raises
        `ValueError` for anything `parse` could not give back.
        """
        if not 1 <= len(key.block_hash) <= MAX_HASH_BYTES:
            raise ValueError(f"block hash of {len(key.block_hash)} bytes: 1 to {MAX_HASH_BYTES}")
        if _SHARD.fullmatch(shard) is None:
            raise ValueError(f"shard {shard!r}: allowed is a text such as 't0of2-p0of1'")
        if not 0 <= key.group < 10**9:
            raise ValueError(f"group {key.group} is out of range")
        name = key.block_hash.hex()
        return f"{self.root}{name[:2]}/{name}/g{key.group}-{shard}.safetensors"


@dataclass(frozen=True, slots=True)
class ChunkAddress:
    """What a chunk's key says."""

    namespace: Namespace
    key: ChunkKey
    shard: str


def parse(key: str) -> ChunkAddress | None:
    """The inverse of `Namespace.chunk`; None for a key it could not have built."""
    match = _CHUNK.fullmatch(key)
    if match is None or not match["hash"].startswith(match["hh"]):
        return None
    prefix = match["prefix"]
    if prefix != prefix.strip("/"):
        return None
    return ChunkAddress(
        Namespace(prefix, match["digest"]),
        ChunkKey(int(match["group"]), bytes.fromhex(match["hash"])),
        match["shard"],
    )


def parse_manifest(key: str) -> Namespace | None:
    """The namespace whose manifest has this key; None for any other key."""
    match = _MANIFEST.fullmatch(key)
    if match is None or match["prefix"] != match["prefix"].strip("/"):
        return None
    return Namespace(match["prefix"], match["digest"])


def all_namespaces(prefix: str) -> str:
    """What every key under `prefix` starts with, whichever namespace; for tools that walk all."""
    return f"{prefix}/{LAYOUT}/"
