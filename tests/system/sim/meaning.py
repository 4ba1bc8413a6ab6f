"""Bytes that say what they are: of which token, after which prefix, computed with which weights of
which model, of which head, in which layer. So a wrong byte anywhere is seen, and can be read."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product

from s3kv.objects.codec import ChunkFormat
from s3kv.objects.integrity import XXH3, Integrity
from s3kv.objects.keys import Namespace
from s3kv.planning.group_kinds import Coverage
from s3kv.types import ChunkKey, TensorSpec
from tests.unit.planning.ranks import TokenKV
from tests.unit.planning.setup import Prefixes, Setup, hash_of

HEADS = 2
LAYERS = 2
TOKEN = struct.Struct("<HBBi")
"""Weights; model and layer; head; the id of the token with its whole prefix."""


@dataclass(frozen=True)
class Shard:
    """The part of one model's KV that a rank holds: a range of heads and a range of layers.

    rank: its number in the engine.
    """

    model: int
    heads: range
    layers: range
    rank: int = field(default=0, compare=False)

    @classmethod
    def of(cls, model: int, world_size: int, rank: int, stages: int = 1) -> Shard:
        """Of one of so many ranks, in so many pipeline stages."""
        tp_size = world_size // stages
        heads, layers = HEADS // tp_size, LAYERS // stages
        head, layer = rank % tp_size * heads, rank // tp_size * layers
        return cls(model, range(head, head + heads), range(layer, layer + layers), rank)

    @classmethod
    def named(cls, model: int, name: str) -> Shard:
        """Inverse of `name`."""
        head, last_head, _, layer, last_layer, _ = map(int, re.findall(r"\d+", name))
        return cls(model, range(head, last_head + 1), range(layer, last_layer + 1))

    @property
    def name(self) -> str:
        heads, layers = self.heads, self.layers
        return f"h{heads[0]}-{heads[-1]}of{HEADS}-l{layers[0]}-{layers[-1]}of{LAYERS}"

    @property
    def namespace(self) -> Namespace:
        return Namespace("s3kv", f"{self.model:032x}")

    @property
    def integrity(self) -> Integrity:
        """One model's objects are sealed with a digest, the other's with a key."""
        return Integrity("blake3-keyed", bytes([7] * 32)) if self.model % 2 else XXH3

    @property
    def order(self) -> str:
        """The dimensions of a page: heads, tokens, content. The models have different ones."""
        return "NHC" if self.model % 2 else "HNC"

    def block_bytes(self, block_tokens: int) -> int:
        return len(self.layers) * len(self.heads) * block_tokens * TOKEN.size

    def write(self, block: memoryview, offset: int, token: TokenKV | None) -> None:
        """Put what every layer and head has of a token at its places in a block."""
        places = _places(self, len(block) // self.block_bytes(1))
        for at, tag in places[offset]:
            block[at : at + TOKEN.size] = (
                TOKEN.pack(token[0], *tag, token[1]) if token else bytes(TOKEN.size)
            )

    def read(self, block: memoryview) -> tuple[TokenKV | None, ...]:
        """The tokens of a block. Anything that is not this shard's reads as weights -1."""
        tokens: list[TokenKV | None] = []
        for places in _places(self, len(block) // self.block_bytes(1)):
            said = [TOKEN.unpack_from(block, at) for at, _ in places]
            weights, *_, prefix = said[0]
            if said == [(weights, *tag, prefix) for _, tag in places]:
                tokens.append((weights, prefix))
            else:
                tokens.append((-1, prefix) if any(any(s) for s in said) else None)
        return tuple(tokens)

    def payload(self, tokens: Sequence[TokenKV], block_tokens: int) -> bytes:
        """What an object holds of these tokens, block by block."""
        size = self.block_bytes(block_tokens)
        data = bytearray(len(tokens) // block_tokens * size)
        for number, token in enumerate(tokens):
            begin = number // block_tokens * size
            self.write(memoryview(data)[begin : begin + size], number % block_tokens, token)
        return bytes(data)


@lru_cache(maxsize=64)
def _places(shard: Shard, block_tokens: int) -> list[list[tuple[int, tuple[int, int]]]]:
    """For each token of a block, its places there, and the layer and head that each is of."""
    heads = len(shard.heads)
    places: list[list[tuple[int, tuple[int, int]]]] = [[] for _ in range(block_tokens)]
    for token, (row, layer), (column, head) in product(
        range(block_tokens), enumerate(shard.layers), enumerate(shard.heads)
    ):
        if shard.order == "HNC":
            at = (row * heads + column) * block_tokens + token
        else:
            at = (row * block_tokens + token) * heads + column
        places[token].append((at * TOKEN.size, (shard.model * LAYERS + layer, head)))
    return places


@lru_cache(maxsize=64)
def _format(shard: Shard, coverage: Coverage, padding_bytes: int) -> ChunkFormat:
    order = shard.order if len(shard.heads) > 1 else "HNC"
    sizes = {"H": len(shard.heads), "N": coverage.block_tokens, "C": TOKEN.size}
    page = tuple(sizes[dimension] for dimension in order)
    layers = tuple(TensorSpec(f"layer.{n}", "U8", page, order=order) for n in shard.layers)
    blocks = len(coverage.held) * len(coverage.members)
    tensors = [TensorSpec.of_layers("kv", blocks, layers)]
    if padding_bytes:
        tensors.append(TensorSpec("padding", "U8", (padding_bytes,)))
    space = shard.namespace.digest
    return ChunkFormat(space, tuple(tensors), coverage.number, shard.name, shard.integrity)


def format_of(shard: Shard, setup: Setup, padding_bytes: int = 0, group: int = 0) -> ChunkFormat:
    """Of a rank's chunks of a coverage. padding_bytes: behind the tokens, whatever is there."""
    return _format(shard, setup.coverage(group), padding_bytes)


def object_key(shard: Shard, key: ChunkKey) -> str:
    name = key.block_hash.hex()
    root = f"{shard.namespace.root}{name[:2]}/{name}"
    return f"{root}/g{key.group}-{shard.name}.safetensors"


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

    @property
    def hashes(self) -> Iterable[bytes]:
        """Of all prefixes."""
        return self._of_hash

    def covered(self, block_hash: bytes) -> list[int]:
        """The prefix ids of the tokens that a hash covers; none for a salted hash."""
        prefix, chain = self._of_hash.get(block_hash, 0), []
        while prefix:
            chain.append(prefix)
            prefix = self._parents[prefix]
        return chain[::-1]
