"""A chunk put together of what ranks of other sizes stored is what the rank would have stored."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from s3kv.objects.codec import ChunkFormat
from s3kv.objects.rearranging import Pages, follows, format_of, is_page, rearrangements
from s3kv.objects.shards import Shard, covers
from s3kv.place import Place
from s3kv.types import TensorSpec, item_bytes
from tests.unit.objects.test_shards import fleet

BLOCKS = 3
HASH = bytes(range(32))


@dataclass(frozen=True)
class Kind:
    """A kind of layers: what its pages are made of."""

    dtype: str = "BF16"
    tokens: int = 4
    content: int = 6
    ratio: int = 1


@dataclass(frozen=True)
class Model:
    """KV of a chunk: for each layer, an array [blocks, kernel blocks, heads, tokens, content]."""

    heads: int
    kinds: tuple[Kind, ...]
    order: str

    def values(self, number: int) -> np.ndarray:
        kind = self.kinds[number]
        shape = (BLOCKS, kind.ratio, self.heads, kind.tokens, kind.content, item_bytes(kind.dtype))
        return np.random.default_rng(number).integers(0, 256, shape, dtype=np.uint8)

    def object_of(self, shard: Shard, parts: int = 1) -> tuple[ChunkFormat, bytes]:
        """What a rank that holds this shard stores: format and object, built by numpy alone."""
        tensors: list[TensorSpec] = []
        payload = b""
        for part in range(parts):
            specs: list[TensorSpec] = []
            arrays: list[np.ndarray] = []
            for number in [n for n in shard.layers if n % parts == part]:
                kind = self.kinds[number]
                array = self.values(number)[:, :, shard.heads.start : shard.heads.stop]
                axes = [2 + "HNC".index(dimension) for dimension in self.order]
                array = array.transpose(0, 1, *axes, 5)
                sizes = {"H": len(shard.heads), "N": kind.tokens, "C": kind.content}
                # What a view of one head looks like: its strides do not tell where the head is.
                order = sorted(self.order, key=lambda d: sizes[d] > 1)
                named = ("B" if kind.ratio > 1 else "") + "".join(order)
                shape = [kind.ratio] * (kind.ratio > 1) + [sizes[d] for d in order]
                name = f"model.layers.{number}.attn"
                specs.append(TensorSpec(name, kind.dtype, tuple(shape), (), named))
                arrays.append(np.ascontiguousarray(array).reshape(BLOCKS, -1))
            if specs:
                tensors.append(TensorSpec.of_layers(f"g{part}", BLOCKS, tuple(specs)))
                payload += np.concatenate(arrays, axis=1).tobytes()
        chunk = ChunkFormat("0" * 32, tuple(tensors), 0, shard.name)
        data = bytearray(chunk.header_bytes) + payload
        chunk.seal(Place.of(data, chunk.header_bytes), HASH)
        return chunk, bytes(data)


def put_together(
    model: Model, wanted: Shard, others: list[Shard], layer: str = "", parts: int = 1
) -> tuple[bytes, bytes] | None:
    """The object as the rank would have stored it, and as it is put together of others'."""
    own, expected = model.object_of(wanted, parts)
    for cover in covers(wanted, others):
        found = rearrangements(own, wanted, cover, Pages(model.order, layer))
        if found is None:
            continue
        made = Place.of(bytearray(own.object_bytes), own.header_bytes)
        for part, shard in zip(found, cover, strict=True):
            theirs, data = model.object_of(shard, parts)
            assert part.format == theirs
            place = Place.of(data, part.format.header_bytes)
            assert part.format.check(place, len(data), HASH) is None
            part.apply(place, made)
        own.seal(made, HASH)
        return expected, bytes(made)
    return None


@pytest.mark.parametrize("order", ["HNC", "NHC"])
@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize(("own", "other"), list(itertools.permutations([1, 2, 4, 8], 2)))
def test_ranks_of_every_size_read_each_other(order: str, ratio: int, own: int, other: int) -> None:
    model = Model(4, (Kind(ratio=ratio),) * 3, order)
    for wanted in fleet(4, 3, own):
        pair = put_together(model, wanted, fleet(4, 3, other))
        assert pair[0] == pair[1]


KINDS = st.builds(
    Kind,
    dtype=st.sampled_from(["BF16", "F32"]),
    tokens=st.integers(2, 5),
    content=st.integers(2, 5),
    ratio=st.integers(1, 3),
)


@given(
    heads=st.integers(1, 12),
    sizes=st.tuples(st.integers(1, 16), st.integers(1, 16)),
    kinds=st.lists(KINDS, min_size=2, max_size=5),
    order=st.sampled_from(["HNC", "NHC"]),
    parts=st.integers(1, 2),
)
def test_layers_of_any_kind_are_put_together(
    heads: int, sizes: tuple[int, int], kinds: list[Kind], order: str, parts: int
) -> None:
    own, other = (tp for tp in sizes)
    if any(heads % tp and tp % heads for tp in sizes):
        return
    model = Model(heads, tuple(kinds), order)
    for wanted in fleet(heads, len(kinds), own):
        pair = put_together(model, wanted, fleet(heads, len(kinds), other), parts=parts)
        same = (max(1, heads // own), max(1, own // heads)) == (
            max(1, heads // other),
            max(1, other // heads),
        )
        assert (pair is None) == same
        assert pair is None or pair[0] == pair[1]


@given(
    own=st.tuples(st.sampled_from([1, 2, 4]), st.integers(1, 4)),
    other=st.tuples(st.sampled_from([1, 2, 4]), st.integers(1, 4)),
    order=st.sampled_from(["HNC", "NHC"]),
)
def test_stages_are_put_together_where_layers_have_names_by_number(
    own: tuple[int, int], other: tuple[int, int], order: str
) -> None:
    model = Model(4, (Kind(),) * 12, order)
    for wanted in fleet(4, 12, *own):
        pair = put_together(model, wanted, fleet(4, 12, *other), "model.layers.{}.attn")
        assert pair is not None or own == other
        assert pair is None or pair[0] == pair[1]


def test_without_such_names_nothing_is_known_of_other_stages() -> None:
    model = Model(4, (Kind(),) * 4, "HNC")
    (whole,) = fleet(4, 4, 1)
    assert put_together(model, whole, fleet(4, 4, 1, 2)) is None
    assert put_together(model, whole, fleet(4, 4, 1, 2), "layers.{}") is None
    mixed = Model(4, (Kind(), Kind("F32"), Kind(), Kind()), "HNC")
    assert put_together(mixed, whole, fleet(4, 4, 1, 2), "model.layers.{}.attn") is None


def test_the_pattern_of_names_is_read_off_the_layers() -> None:
    def layers(*names: str) -> list[TensorSpec]:
        return [TensorSpec(name, "BF16", (2, 2, 2), (), "HNC") for name in names]

    assert follows(layers("a.2.b", "a.3.b"), range(2, 4)) == "a.{}.b"
    assert follows(layers("2.2.b", "2.3.b"), range(2, 4)) == "2.{}.b"
    for names in (("a.2.b", "a.4.b"), ("a.3.b", "a.2.b"), ("a.2.b",), ("a2", "a3"), ("2.{", "3.{")):
        assert follows(layers(*names), range(2, 4)) == "", names
    assert follows([*layers("a.2.b"), replace(layers("a.3.b")[0], dtype="F32")], range(2, 4)) == ""


@pytest.mark.parametrize(
    "page",
    [
        TensorSpec("l", "BF16", (2, 3, 4), (), "NHC"),  # in another order
        TensorSpec("l", "BF16", (2, 4, 3), (), "HCN"),  # the content of a token in pieces
        TensorSpec("l", "BF16", (4, 3, 4), (), "HNC"),  # of other heads
        TensorSpec("l", "BF16", (2, 1, 4), (), "HNC"),  # its order cannot be told
        TensorSpec("l", "U8", (7,), (), "C"),
        TensorSpec("l", "U8", (), (), ""),
        TensorSpec("l", "BF16", (2, 3), (), "HNC"),
    ],
)
def test_a_page_of_another_kind_is_not_taken_apart(page: TensorSpec) -> None:
    good = TensorSpec("k", "BF16", (2, 3, 4), (), "HNC")
    assert is_page(good, 2, "HNC")
    assert not is_page(page, 2, "HNC")
    own = ChunkFormat("0" * 32, (TensorSpec.of_layers("g0", 2, (good, page)),), 0, "x")
    wanted, whole = Shard(range(2), 4, range(2), 2), Shard(range(4), 4, range(2), 2)
    assert format_of(own, wanted, whole, Pages("HNC")) is None
    assert rearrangements(own, wanted, [whole], Pages("HNC")) is None


def test_an_order_that_is_none_takes_nothing_apart() -> None:
    for order in ("HCN", "CHN", "NC", "", "HNCC", "NCH", "CNH"):
        assert not is_page(TensorSpec("l", "BF16", (2,) * len(order), (), order), 2, order), order


def test_a_cover_that_lacks_a_byte_or_has_one_twice_is_none() -> None:
    model = Model(4, (Kind(),) * 2, "HNC")
    (whole,) = fleet(4, 2, 1)
    own, _ = model.object_of(whole)
    halves = fleet(4, 2, 2)
    pages = Pages("HNC", "model.layers.{}.attn")
    assert rearrangements(own, whole, halves, pages) is not None
    assert rearrangements(own, whole, halves[:1], pages) is None
    assert rearrangements(own, whole, [*halves, halves[0]], pages) is None
    assert rearrangements(own, whole, [halves[0], *fleet(4, 2, 4)[1:]], pages) is None


def test_a_header_too_long_to_be_written_is_no_format() -> None:
    name = "x" * 4000
    layers = tuple(TensorSpec(f"{name}.{n}", "BF16", (1, 2, 2), (), "HNC") for n in range(150))
    own = ChunkFormat("0" * 32, (TensorSpec.of_layers("g0", 1, layers),), 0, "x")
    wanted = Shard(range(1), 2, range(150), 300)
    other = Shard(range(2), 2, range(300), 300)
    pages = Pages("HNC", f"{name}.{{}}")
    assert format_of(own, wanted, replace(other, layers=wanted.layers), pages) is not None
    assert format_of(own, wanted, other, pages) is None
