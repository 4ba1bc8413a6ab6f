"""The memory that an engine's processes take on a host, by vLLM's configuration and its groups."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import ECTransferConfig, KVTransferConfig, ParallelConfig
from vllm.distributed import parallel_state

from s3kv.connectors.worker_memory import planned_slabs
from s3kv.errors import ConfigError

GIB = 2**30
KV, ENCODER, STAGING = ("host_bytes, per rank", "host_bytes of encoder outputs", "encoder uploads")
Spread = tuple[int, int, int]
"""Ranks of vLLM's world group, hosts, and the rank that asks."""


SETTINGS = {"bucket": "bkt", "host_bytes": "16GiB"}
FOUR, EIGHT = {"tensor_parallel_size": 4}, {"tensor_parallel_size": 4, "pipeline_parallel_size": 2}
BOTH_HALVES = FOUR | {"data_parallel_size": 2}
Plan = Callable[..., Any]


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Plan:
    """The slabs planned by a worker of an engine with these connectors."""

    def plan(
        spread: Spread, parallel: dict[str, int], kv: Any = None, ec: Any = None, **more: Any
    ) -> Any:
        world_size, hosts, rank = spread
        world = SimpleNamespace(world_size=world_size, rank=rank)
        monkeypatch.setattr(parallel_state, "get_world_group", lambda: world)
        monkeypatch.setattr(parallel_state, "get_node_count", lambda: hosts)
        names = more.get("names", ("S3KVConnector", "S3ECConnector"))
        kv_config = KVTransferConfig(
            kv_connector=names[0], kv_role="kv_both", kv_connector_extra_config=kv or {}
        )
        ec_config = ECTransferConfig(
            ec_connector=names[1],
            ec_role=more.get("ec_role", "ec_both"),
            ec_connector_extra_config=ec or {},
        )
        config: Any = SimpleNamespace(
            parallel_config=ParallelConfig(**parallel),
            kv_transfer_config=kv_config if kv else None,
            ec_transfer_config=ec_config if ec else None,
        )
        return planned_slabs(config)

    return plan


@pytest.mark.parametrize(
    ("spread", "parallel", "ranks"),
    [
        pytest.param((1, 1, 0), {}, 1, id="one rank"),
        pytest.param((4, 1, 3), FOUR, 4, id="tensor parallel"),
        pytest.param((8, 1, 3), EIGHT, 8, id="two stages"),
        pytest.param((8, 2, 5), EIGHT, 4, id="a stage on each of two hosts"),
        pytest.param((8, 1, 5), BOTH_HALVES, 8, id="mixture of experts"),
        pytest.param((3, 2, 0), {"tensor_parallel_size": 3}, 1, id="hosts that differ"),
    ],
)
def test_every_rank_on_this_host_counts(
    plan: Plan, spread: Spread, parallel: dict[str, int], ranks: int
) -> None:
    assert plan(spread, parallel, SETTINGS) == ((ranks, 16 * GIB, KV),)


@pytest.mark.parametrize(
    ("role", "here"),
    [
        ("ec_both", ((1, 16 * GIB, ENCODER), (1, GIB, STAGING))),
        ("ec_producer", ((1, GIB, STAGING),)),
        ("ec_consumer", ((1, 16 * GIB, ENCODER),)),
    ],
)
def test_encoder_outputs_take_memory_once_in_an_engine(plan: Plan, role: str, here: Any) -> None:
    assert plan((4, 1, 3), FOUR, SETTINGS, SETTINGS, ec_role=role) == ((4, 16 * GIB, KV), *here)
    assert plan((4, 1, 3), FOUR, ec=SETTINGS, ec_role=role) == here


@pytest.mark.parametrize(
    ("spread", "parallel", "engines"),
    [
        pytest.param((8, 2, 3), EIGHT, 1, id="the engine's first host"),
        pytest.param((8, 2, 4), EIGHT, 0, id="its second host"),
        pytest.param((8, 1, 4), BOTH_HALVES, 2, id="two engines here"),
        pytest.param((8, 2, 4), BOTH_HALVES, 1, id="one on each host"),
        pytest.param((16, 4, 9), EIGHT | {"data_parallel_size": 2}, 1, id="two on four hosts"),
        pytest.param((16, 4, 13), EIGHT | {"data_parallel_size": 2}, 0, id="the last of these"),
    ],
)
def test_encoder_outputs_are_on_the_host_of_the_first_rank(
    plan: Plan, spread: Spread, parallel: dict[str, int], engines: int
) -> None:
    here = plan(spread, parallel, ec=SETTINGS)
    assert here == ((engines, 16 * GIB, ENCODER), (engines, GIB, STAGING))


def test_other_connectors_do_not_count(plan: Plan) -> None:
    names = ("OffloadingConnector", "ECExampleConnector")
    assert plan((2, 1, 0), {}, SETTINGS, SETTINGS, names=names) == ()
    with pytest.raises(ConfigError, match="host_bytes"):
        plan((1, 1, 0), {}, SETTINGS, {"bucket": "bkt", "host_bytes": -1})
