"""Rearranging: a rank's chunk from the objects of ranks that hold other heads and layers of it.

A page has the same layout in an object as in memory, and its dimensions have one order in the whole
namespace. So another rank's object differs only in the number of heads of every page and in the
layers of every block. `format_of` derives the exact format of that object; `Rearrangement` maps
its bytes to those of the rank's own. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod

from s3kv.objects.codec import ChunkFormat
from s3kv.objects.shards import Shard
from s3kv.place import Place
from s3kv.types import TensorSpec, item_bytes, laid_out

_DIMENSIONS = "HNC"
_KERNEL_BLOCKS = "B"


@dataclass(frozen=True, slots=True)
class Pages:
    """Features that all pages of a namespace have in common.

    order: the dimensions of a page from the slowest to the fastest in memory, "HNC" or "NHC": heads
        (H), tokens (N), content of a token (C). The layout of a rank with one head hides it.
    layer: name of a layer, with "{}" for its number in the model; empty if the layers do not follow
        such a pattern. No rank then knows the layers of another pipeline stage.
    """

    order: str
    layer: str = ""


def order_of(order: str, heads: int) -> str:
    """The order of a page's dimensions as an object names it: a dimension of one element comes
    first, because its place in memory is arbitrary."""
    return "H" + order.replace("H", "") if heads == 1 else order


def is_page(layer: TensorSpec, heads: int, order: str) -> bool:
    """Whether a layer is a page with `heads` heads in this order, and can be split by heads."""
    named = layer.order.removeprefix(_KERNEL_BLOCKS)
    sizes = dict(zip(layer.order, layer.shape, strict=False))
    return (
        len(layer.order) == len(layer.shape)
        and sorted(order) == sorted(_DIMENSIONS)
        and order[-1] == "C"
        and named == order_of(order, heads)
        and sizes["H"] == heads
        and sizes["N"] > 1
        and sizes["C"] > 1
    )


def format_of(own: ChunkFormat, wanted: Shard, other: Shard, pages: Pages) -> ChunkFormat | None:
    """The format of the objects of shard `other`, for the rank whose objects of shard `wanted` have
    the format `own`. None if it is not known."""
    tensors: list[TensorSpec] = []
    for part in own.tensors:
        layers = part.layers
        if not layers or not all(is_page(it, len(wanted.heads), pages.order) for it in layers):
            return None
        if other.layers != wanted.layers:
            if not _follow(layers, wanted.layers, pages.layer) or len(own.tensors) > 1:
                return None
            names = map(pages.layer.format, other.layers)
            layers = tuple(replace(layers[0], name=name) for name in names)
        resized = tuple(_with_heads(layer, len(other.heads), pages.order) for layer in layers)
        tensors.append(TensorSpec.of_layers(part.name, part.shape[0], resized))
    try:
        return replace(own, tensors=tuple(tensors), shard=other.name)
    except ValueError:  # its header would be too long, so no such object exists
        return None


def follows(layers: Sequence[TensorSpec], numbers: range) -> str:
    """The name of a layer with "{}" for its number, if these layers are alike and have these
    numbers in order; otherwise empty."""
    first = layers[0].name.split(".")
    for place, part in enumerate(first):
        if part == str(numbers[0]):
            template = ".".join([*first[:place], "{}", *first[place + 1 :]])
            if "{" not in layers[0].name and _follow(layers, numbers, template):
                return template
    return ""


def _follow(layers: Sequence[TensorSpec], numbers: range, template: str) -> bool:
    named = [template.format(number) for number in numbers] if template else []
    alike = {(layer.dtype, layer.shape, layer.order) for layer in layers}
    return [layer.name for layer in layers] == named and len(alike) == 1


def _with_heads(layer: TensorSpec, heads: int, order: str) -> TensorSpec:
    sizes = dict(zip(layer.order, layer.shape, strict=True)) | {"H": heads}
    outer = _KERNEL_BLOCKS if _KERNEL_BLOCKS in sizes else ""
    named = outer + order_of(order, heads)
    return replace(layer, shape=tuple(sizes[d] for d in named), order=named)


@dataclass(frozen=True, slots=True)
class Run:
    """`nbytes` bytes of a block, at `begin` in the payload of the rank's own object, and at
    `source` in that of the other object."""

    begin: int
    source: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class _PartRuns:
    """The runs of one part. Block `b` begins `b * block_bytes` and `b * source_bytes` later."""

    blocks: int
    block_bytes: int
    source_bytes: int
    runs: tuple[Run, ...]


class Rearrangement:
    """The bytes that a rank takes from objects of another shard, and their places in its own. own,
    wanted: format and shard of the rank. other (by `format_of`), shard: those of what it reads."""

    def __init__(
        self, own: ChunkFormat, wanted: Shard, other: ChunkFormat, shard: Shard, order: str
    ) -> None:
        self.format = other
        self._parts: list[_PartRuns] = []
        pairs = zip(laid_out(own.tensors), laid_out(other.tensors), strict=True)
        for (part, begin, _), (theirs, source, _) in pairs:
            runs = _joined(_runs(part.layers, wanted.heads, theirs.layers, shard.heads, order))
            at = tuple(Run(begin + r.begin, source + r.source, r.nbytes) for r in runs)
            blocks = part.shape[0]
            block_bytes, source_bytes = part.nbytes // blocks, theirs.nbytes // blocks
            self._parts.append(_PartRuns(blocks, block_bytes, source_bytes, at))

    @property
    def spans(self) -> Iterator[range]:
        """The bytes of the rank's own payload that `apply` writes."""
        for part in self._parts:
            for block, run in product(range(part.blocks), part.runs):
                begin = block * part.block_bytes + run.begin
                yield range(begin, begin + run.nbytes)

    def apply(self, source: Place, target: Place) -> None:
        """Copy the rank's bytes from the object in `source` to their places in that in `target`."""
        theirs, own = source.payload, target.payload
        for part in self._parts:
            for block in range(part.blocks):
                to, of = block * part.block_bytes, block * part.source_bytes
                for run in part.runs:
                    begin, other = to + run.begin, of + run.source
                    own[begin : begin + run.nbytes] = theirs[other : other + run.nbytes]


def rearrangements(
    own: ChunkFormat, wanted: Shard, cover: Sequence[Shard], pages: Pages
) -> list[Rearrangement] | None:
    """The bytes that a rank takes from each shard of a cover; None unless they make up its payload,
    each byte once."""
    found: list[Rearrangement] = []
    for shard in cover:
        other = format_of(own, wanted, shard, pages)
        if other is None:
            return None
        found.append(Rearrangement(own, wanted, other, shard, pages.order))
    at = 0
    for begin, end in sorted((s.start, s.stop) for it in found for s in it.spans):
        if begin != at:
            return None
        at = end
    return found if at == own.payload_bytes else None


def _runs(
    layers: Sequence[TensorSpec],
    heads: range,
    others: Sequence[TensorSpec],
    other_heads: range,
    order: str,
) -> Iterator[Run]:
    """The runs of a block, in the order of the rank's own payload."""
    both = range(max(heads.start, other_heads.start), min(heads.stop, other_heads.stop))
    places = {layer.name: begin for layer, begin, _ in laid_out(others)}
    for layer, begin, _ in laid_out(layers):
        if layer.name in places and both:
            source = places[layer.name]
            sizes = dict(zip(layer.order, layer.shape, strict=True))
            outer = [sizes.get(_KERNEL_BLOCKS, 1), *(sizes[d] for d in order[: order.index("H")])]
            inner = prod(sizes[d] for d in order[order.index("H") + 1 :]) * item_bytes(layer.dtype)
            row, their_row = len(heads) * inner, len(other_heads) * inner
            for number in range(prod(outer)):
                yield Run(
                    begin + number * row + (both.start - heads.start) * inner,
                    source + number * their_row + (both.start - other_heads.start) * inner,
                    len(both) * inner,
                )


def _joined(runs: Iterator[Run]) -> Iterator[Run]:
    """The same runs; those adjacent in both objects are joined."""
    last: Run | None = None
    for run in runs:
        if last is None:
            last = run
        elif (last.begin + last.nbytes, last.source + last.nbytes) == (run.begin, run.source):
            last = replace(last, nbytes=last.nbytes + run.nbytes)
        else:
            yield last
            last = run
    if last is not None:
        yield last
