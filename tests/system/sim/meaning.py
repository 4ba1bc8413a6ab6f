"""Bytes that say what they are: of which token, after which prefix, computed with which weights of
which model, on which rank, in which layer. So a wrong byte anywhere is seen, and can be read.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache

from s3kv.objects.codec import ChunkFormat
from s3kv.objects.integrity import XXH3, Integrity
from s3kv.objects.keys import Namespace
from s3kv.types import TensorSpec
from tests.unit.planning.ranks import TokenKV
from tests.unit.planning.setup import Prefixes, Setup, hash_of

LAYERS = 2
TOKEN = struct.Struct("<HBBi")
"""Weights; model and layer; world size and rank; the id of the token with its whole prefix."""


@dataclass(frozen=True)
class Shard:
    """One rank's part of one model's KV."""

    model: int
    world_size: int
    rank: int

    @property
    def name(self) -> str:
        return f"h{self.rank}-{self.rank}of{self.world_size}-l0-1of2"

    @property
    def namespace(self) -> Namespace:
        return Namespace("s3kv", f"{self.model:032x}")

    @property
    def integrity(self) -> Integrity:
        """One model's objects are sealed with a digest, the other's with a key."""
        return Integrity("blake3-keyed", bytes([7] * 32)) if self.model % 2 else XXH3

    def tag(self, layer: int) -> tuple[int, int]:
        return self.model * LAYERS + layer, self.world_size * 16 + self.rank

    def tokens(self, layer: int, tokens: tuple[TokenKV | None, ...]) -> bytes:
        """What the layer holds of these tokens."""
        tag = self.tag(layer)
        return b"".join(TOKEN.pack(t[0], *tag, t[1]) if t else bytes(TOKEN.size) for t in tokens)

    def payload(self, tokens: tuple[TokenKV | None, ...]) -> bytes:
        return b"".join(self.tokens(layer, tokens) for layer in range(LAYERS))

    def read(self, layers: list[bytes]) -> tuple[TokenKV | None, ...]:
        """The tokens these bytes are of. Anything that is not this shard's reads as weights -1."""
        tags = [self.tag(layer) for layer in range(LAYERS)]
        tokens: list[TokenKV | None] = []
        for said in zip(*(TOKEN.iter_unpack(layer) for layer in layers), strict=True):
            weights, prefix = said[0][0], said[0][3]
            ours = all(s == (weights, *tag, prefix) for s, tag in zip(said, tags, strict=True))
            if ours:
                tokens.append((weights, prefix))
            else:
                tokens.append((-1, prefix) if any(any(s) for s in said) else None)
        return tuple(tokens)


@lru_cache(maxsize=64)
def _format(shard: Shard, chunk_tokens: int, block_tokens: int, padding_bytes: int) -> ChunkFormat:
    shape = (chunk_tokens // block_tokens, block_tokens, TOKEN.size)
    tensors = [TensorSpec(f"layer.{layer}", "U8", shape) for layer in range(LAYERS)]
    if padding_bytes:
        tensors.append(TensorSpec("padding", "U8", (padding_bytes,)))
    space = shard.namespace.digest
    return ChunkFormat(space, tuple(tensors), 0, shard.name, shard.integrity)


def format_of(shard: Shard, setup: Setup, padding_bytes: int = 0) -> ChunkFormat:
    """Of a rank's chunks. padding_bytes: behind the tokens, whatever is there."""
    return _format(shard, setup.chunk_tokens, setup.block_tokens, padding_bytes)


class Dictionary(Prefixes):
    """Prefix ids of the whole fleet, and what the hashes made of them stand for."""

    def __init__(self) -> None:
        super().__init__()
        self._parents: dict[int, int] = {}
        self._of_hash: dict[bytes, int] = {}

    def extend(self, chain: list[int], token: int) -> None:
        before = chain[-1] if chain else 0
        super().extend(chain, token)
        if chain[-1] not in self._parents:
            self._parents[chain[-1]] = before
            self._of_hash[hash_of(chain[-1])] = chain[-1]

    def chain(self, prompt: list[int]) -> list[int]:
        """The prefix ids of its tokens."""
        chain: list[int] = []
        for token in prompt:
            self.extend(chain, token)
        return chain

    def tokens(self, block_hash: bytes, count: int) -> tuple[TokenKV, ...] | None:
        """The last tokens this hash covers, with the first weights; None for a salted hash."""
        prefix = self._of_hash.get(block_hash)
        if prefix is None:
            return None
        tokens: list[TokenKV] = []
        while prefix and len(tokens) < count:
            tokens.append((0, prefix))
            prefix = self._parents[prefix]
        return tuple(reversed(tokens))
