"""Names of shards, and which shards hold what a rank needs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from s3kv.objects.keys import shard_name
from s3kv.objects.shards import MOST_COVERS, Shard, covers


def fleet(heads: int, layers: int, tp: int, stages: int = 1) -> list[Shard]:
    """The shards of all ranks of an engine of that size."""
    found = []
    for stage in range(stages):
        span = range(stage * layers // stages, (stage + 1) * layers // stages)
        for rank in range(tp):
            name = shard_name(max(1, heads // tp), heads, span, layers, tp_rank=rank, tp_size=tp)
            shard = Shard.parse(name)
            assert shard.name == name
            found.append(shard)
    return found


def names(cover: tuple[Shard, ...]) -> list[str]:
    return [shard.name for shard in cover]


@pytest.mark.parametrize(
    "name",
    [
        "",
        "whole",
        "h0-3of8",
        "h0-3of8-l0-0of1-x",
        "h4-3of8-l0-0of1",
        "h0-8of8-l0-0of1",
        "h0-3of8-l1-0of2",
        "h0-3of8-l0-2of2",
        "h00-3of8-l0-0of1",
        "h0-3of8-l0-0of1-r0of1",
        "h0-3of8-l0-0of1-r2of2",
        "h0-3of8-l0-0of1\n",
        "h0-3of8-l0-0of9999999999",
        "h٣-3of8-l0-0of1",
    ],
)
def test_what_is_no_name_of_a_shard(name: str) -> None:
    assert Shard.parse(name) is None


def test_a_larger_shard_covers_and_smaller_ones_do_together() -> None:
    (whole,) = fleet(8, 32, 1)
    halves = fleet(8, 32, 2)
    assert covers(halves[1], [whole, *halves]) == [(whole,)]
    assert covers(whole, [whole, *halves]) == [tuple(halves)]
    quarters = fleet(8, 32, 4)
    assert covers(halves[1], [*halves, *quarters]) == [tuple(quarters[2:])]


def test_the_fewest_come_first_and_no_more_than_a_few() -> None:
    sizes = [fleet(16, 32, tp) for tp in (1, 2, 4, 8, 16)]
    found = covers(sizes[2][1], [shard for size in sizes for shard in size])
    assert [len(cover) for cover in found] == [1, 1, 2, 4]
    assert len(found) == MOST_COVERS
    assert names(found[0]) == ["h0-15of16-l0-31of32"]


def test_nothing_covers_without_each_shard_of_the_same_model_in_another_size() -> None:
    for tp in (1, 2, 8, 16):
        shards = fleet(8, 32, tp)
        assert all(covers(shard, shards) == [] for shard in shards)
    (whole,) = fleet(8, 32, 1)
    for lacking in (fleet(8, 32, 4)[:3], fleet(8, 32, 4)[1:], fleet(8, 32, 1, 2)[:1]):
        assert covers(whole, lacking) == []
    assert covers(whole, [*fleet(16, 32, 2), *fleet(8, 33, 2)]) == []


def test_stages_follow_each_other() -> None:
    (whole,) = fleet(8, 32, 1)
    stages = fleet(8, 32, 1, 2)
    assert covers(whole, stages) == [tuple(stages)]
    both = fleet(8, 32, 2, 4)
    assert covers(stages[1], both) == [tuple(both[4:])]
    # Stages that overlap are not put together.
    assert covers(whole, [stages[0], Shard(range(8), 8, range(10, 32), 32)]) == []


def test_of_heads_held_by_several_ranks_the_first_copy_is_read() -> None:
    (whole,) = fleet(2, 32, 1)
    copies = fleet(2, 32, 4)
    assert names(covers(whole, copies)[0]) == ["h0-0of2-l0-31of32-r0of2", "h1-1of2-l0-31of32-r0of2"]
    assert covers(copies[1], fleet(2, 32, 2)) == [(fleet(2, 32, 2)[0],)]
    assert covers(copies[1], copies) == []


@given(
    heads=st.sampled_from([1, 2, 4, 6, 8, 12]),
    sizes=st.lists(st.tuples(st.integers(1, 16), st.integers(1, 4)), min_size=2, max_size=4),
)
def test_a_cover_has_each_head_of_each_layer_once(heads: int, sizes: list[tuple[int, int]]) -> None:
    fleets = [
        fleet(heads, 12, tp, stages) for tp, stages in sizes if heads % tp == 0 or tp % heads == 0
    ]
    known = [shard for shards in fleets for shard in shards]
    for wanted in known:
        for cover in covers(wanted, known):
            for head in wanted.heads:
                for layer in wanted.layers:
                    holders = [s for s in cover if head in s.heads and layer in s.layers]
                    assert len(holders) == 1
            assert wanted not in cover
