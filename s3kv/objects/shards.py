"""Shards: the KV heads and layers that one rank holds of a chunk, and how shards cover each other.

An object holds the shard of one rank. Ranks of another tensor- or pipeline-parallel size have other
shards of the same chunk, and a set of those may hold all of a rank's KV: one larger shard, or
several smaller ones. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

_NUMBER = r"(0|[1-9][0-9]{0,8})"
_NAME = re.compile(
    rf"h{_NUMBER}-{_NUMBER}of{_NUMBER}-l{_NUMBER}-{_NUMBER}of{_NUMBER}"
    rf"(?:-r{_NUMBER}of{_NUMBER})?"
)
MOST_COVERS = 4
"""Most sets of shards tried for a chunk. Few namespaces have more shapes than this, and every set
costs a request if the chunk is not in the bucket."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A range of KV heads and a range of layers, with the total numbers of both.

    copy, copies: the number of this shard among those of ranks that hold the same heads and may
        differ; 0 of 1 if there is only one.
    """

    heads: range
    total_heads: int
    layers: range
    total_layers: int
    copy: int = 0
    copies: int = 1

    @property
    def name(self) -> str:
        """The name in object keys, as in "h0-3of8-l0-15of32"."""
        heads, layers = self.heads, self.layers
        name = (
            f"h{heads[0]}-{heads[-1]}of{self.total_heads}"
            f"-l{layers[0]}-{layers[-1]}of{self.total_layers}"
        )
        return name if self.copies == 1 else f"{name}-r{self.copy}of{self.copies}"

    @classmethod
    def parse(cls, name: str) -> Shard | None:
        """Inverse of `name`; None for a text that is not such a name."""
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        first, last, heads, low, high, layers, copy, copies = (
            int(number or 0) for number in match.groups()
        )
        shard = cls(range(first, last + 1), heads, range(low, high + 1), layers, copy, copies or 1)
        is_range = first <= last < heads and low <= high < layers
        return shard if is_range and copy < shard.copies and shard.name == name else None


def covers(wanted: Shard, shards: Iterable[Shard]) -> list[tuple[Shard, ...]]:
    """The sets of other shards that together hold all of `wanted`: at most `MOST_COVERS`, those
    with the fewest shards first.

    The shards of a set have equal numbers of heads and do not overlap. The first copy is taken.
    """
    others = {
        shard
        for shard in shards
        if (shard.total_heads, shard.total_layers) == (wanted.total_heads, wanted.total_layers)
        and shard.copy == 0
        and (shard.heads, shard.layers, shard.copies)
        != (wanted.heads, wanted.layers, wanted.copies)
        and _overlap(shard.heads, wanted.heads)
        and _overlap(shard.layers, wanted.layers)
    }
    # Two shapes may share a range of heads and layers, and differ in their number of copies.
    by_shape: dict[tuple[int, int], dict[tuple[range, range], Shard]] = {}
    for shard in others:
        shape = by_shape.setdefault((len(shard.heads), shard.copies), {})
        shape[shard.heads, shard.layers] = shard
    found: list[tuple[Shard, ...]] = []
    for places in by_shape.values():
        heads = next(_chains(wanted.heads, {heads for heads, _ in places}), None)
        if heads is None:
            continue
        for layers in _chains(wanted.layers, {layers for _, layers in places}):
            cover = [places.get((h, la)) for la in layers for h in heads]
            if all(cover):
                found.append(tuple(shard for shard in cover if shard is not None))
    found.sort(key=lambda cover: (len(cover), [shard.name for shard in cover]))
    return found[:MOST_COVERS]


def _overlap(one: range, other: range) -> bool:
    return one.start < other.stop and other.start < one.stop


def _chains(wanted: range, ranges: Iterable[range]) -> Iterator[list[range]]:
    """Ranges without gaps or overlaps between them, from one with the first of `wanted` to one with
    the last. At most a hundred are tried."""
    ordered = sorted(ranges, key=lambda r: (r.start, r.stop))
    begun = [[r] for r in ordered if wanted.start in r]
    for _ in range(100):
        if not begun:
            return
        chain = begun.pop()
        end = chain[-1].stop
        if end >= wanted.stop:
            yield chain
        else:
            begun += [[*chain, r] for r in ordered if r.start == end]
