"""Pools of any rank and stride give the bytes of a block as an object has them."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from s3kv.device.pools import BlockPools
from s3kv.device.tensors import BlockTensors
from s3kv.errors import UnsupportedError

DTYPES = (torch.bfloat16, torch.float64, torch.int32)
BLOCKS = 5


@st.composite
def strided(draw: st.DrawFn) -> tuple[tuple[int, ...], torch.dtype, list[int], int]:
    """A block's shape and dtype, how far each of its dimensions reaches too far, and where the
    dimension of the blocks comes among them."""
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=0, max_size=5)))
    pads = [draw(st.sampled_from([0, 0, 0, 1, 3])) for _ in range(len(shape) + 1)]
    return shape, draw(st.sampled_from(DTYPES)), pads, draw(st.integers(0, len(shape)))


def pool_of(case: tuple[tuple[int, ...], torch.dtype, list[int], int]) -> torch.Tensor:
    """Full of noise; its blocks may be padded, or lie between each other's rows."""
    shape, dtype, pads, at = case
    sizes = [*shape[:at], BLOCKS, *shape[at:]]
    strides, reach = [0] * len(sizes), 1
    for d in range(len(sizes) - 1, -1, -1):
        reach += pads[d]
        strides[d] = reach
        reach *= sizes[d]
    memory = torch.randint(0, 256, (reach * dtype.itemsize + 8,), dtype=torch.uint8).view(dtype)
    return torch.as_strided(memory, sizes, strides).movedim(at, 0)


def raw(tensor: torch.Tensor) -> bytes:
    return torch.cat([tensor.reshape(-1)]).view(torch.uint8).numpy().tobytes()


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases=st.lists(strided(), min_size=1, max_size=3), number=st.integers(0, BLOCKS - 1))
def test_the_moves_are_a_block_s_payload(
    cases: list[tuple[tuple[int, ...], torch.dtype, list[int], int]], number: int
) -> None:
    pools = {f"t{n}": pool_of(case) for n, case in enumerate(cases)}
    shapes = {name: (tuple(pool.shape[1:]), pool.dtype) for name, pool in pools.items()}
    layout = BlockPools(BlockTensors(shapes), pools).layout
    moves = list(layout.moves((number,), 0))
    assert [move.offset for move in moves] == [0, *(m.offset + m.nbytes for m in moves[:-1])]
    payload = b"".join(_memory(pools.values(), move.address, move.nbytes) for move in moves)
    assert payload == b"".join(raw(pool[number]) for pool in pools.values())


def _memory(pools: object, address: int, nbytes: int) -> bytes:
    for pool in pools:  # type: ignore[attr-defined]
        storage = pool.untyped_storage()
        begin = address - storage.data_ptr()
        if begin >= 0 and begin + nbytes <= storage.nbytes():
            whole = torch.empty(0, dtype=torch.uint8).set_(storage)
            return whole[begin : begin + nbytes].numpy().tobytes()
    raise AssertionError(f"{address} is in none of the pools")


def test_an_engine_s_cache_is_one_move_per_side_and_layer() -> None:
    # [layers, 2, blocks, tokens, heads, content]: a block is 2 x layers runs.
    cache = torch.zeros(3, 2, BLOCKS, 4, 2, 8, dtype=torch.bfloat16).movedim(2, 0)
    shapes = {"kv": (tuple(cache.shape[1:]), cache.dtype)}
    layout = BlockPools(BlockTensors(shapes), {"kv": cache}).layout
    moves = list(layout.moves((1,), 0))
    assert [move.nbytes for move in moves] == [4 * 2 * 8 * 2] * 6
    assert all(b.address - a.address == BLOCKS * 128 for a, b in pairwise(moves))


def test_what_is_written_is_read() -> None:
    generator = torch.Generator().manual_seed(1)
    tensors = BlockTensors({"a": ((2, 3), torch.float32), "b": ((), torch.int64)})
    pools = BlockPools.new(tensors, BLOCKS, torch.device("cpu"))
    block = {
        "a": torch.randn(2, 3, generator=generator),
        "b": torch.tensor(7, dtype=torch.int64),
    }
    pools.write(3, block)
    into = {"a": torch.zeros(2, 3), "b": torch.zeros((), dtype=torch.int64)}
    pools.read(3, into)
    assert torch.equal(into["a"], block["a"])
    assert into["b"] == 7


ONE = {"a": ((2, 4), torch.float32)}
TWO = {"a": ((2, 4), torch.float32), "b": ((2, 4), torch.float32)}
MEMORY = torch.zeros(BLOCKS, 2, 4)
REFUSED = [
    (ONE, {"b": MEMORY}, "expected are"),
    (ONE, {"a": torch.zeros(BLOCKS, 4, 2)}, "expected is"),
    (ONE, {"a": torch.zeros(BLOCKS, 4, 2).transpose(1, 2)}, "as they do in memory"),
    (ONE, {"a": torch.tensor(0.0)}, "blocks"),
    (ONE, {"a": MEMORY[:0]}, "blocks"),
    (TWO, {"a": MEMORY, "b": torch.zeros(BLOCKS + 1, 2, 4)}, r"\[5, 6\] blocks"),
    (TWO, {"a": MEMORY, "b": MEMORY}, "same memory"),
]


@pytest.mark.parametrize(("shapes", "pools", "reason"), REFUSED)
def test_pools_that_do_not_fit_are_refused(
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]],
    pools: dict[str, torch.Tensor],
    reason: str,
) -> None:
    with pytest.raises(ValueError, match=reason):
        BlockPools(BlockTensors(shapes), pools)


def test_memory_that_cannot_be_copied_is_refused() -> None:
    tensors = BlockTensors(ONE)
    for pool in (torch.zeros(1, 2, 4).expand(5, 2, 4), torch.zeros(5, 2, 4, device="meta")):
        with pytest.raises(UnsupportedError, match="layer a"):
            BlockPools(tensors, {"a": pool})
