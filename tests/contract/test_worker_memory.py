"""The memory that an engine's processes take on a host, by vLLM's configuration and its groups."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import ECTransferConfig, KVTransferConfig, ParallelConfig
from vllm.distributed import parallel_state

from s3kv.connectors.worker_memory import planned_slabs
from s3kv.errors import ConfigError

GIB = 2**30
KV, ENCODER, STAGING = (
    "host_bytes, per rank",
    "host_bytes of encoder outputs",
    "encoder uploads",
)
Spread = tuple[int, int, int]
"""Ranks of vLLM's world group, hosts, and the rank that asks."""


def engine(
    monkeypatch: pytest.MonkeyPatch,
    spread: Spread,
    *,
    parallel: dict[str, int] | None = None,
    kv: dict[str, Any] | None = None,
    ec: dict[str, Any] | None = None,
    ec_role: Any = "ec_both",
) -> Any:
    """The configuration that a worker has."""
    world_size, hosts, rank = spread
    world = SimpleNamespace(world_size=world_size, rank=rank)
    monkeypatch.setattr(parallel_state, "get_world_group", lambda: world)
    monkeypatch.setattr(parallel_state, "get_node_count", lambda: hosts)
    return SimpleNamespace(
        parallel_config=ParallelConfig(**(parallel or {})),
        kv_transfer_config=KVTransferConfig(
            kv_connector="S3KVConnector", kv_role="kv_both", kv_connector_extra_config=kv
        )
        if kv is not None
        else None,
        ec_transfer_config=ECTransferConfig(
            ec_connector="S3ECConnector", ec_role=ec_role, ec_connector_extra_config=ec
        )
        if ec is not None
        else None,
    )


SETTINGS = {"bucket": "bkt", "host_bytes": "16GiB"}
FOUR, EIGHT = {"tensor_parallel_size": 4}, {"tensor_parallel_size": 4, "pipeline_parallel_size": 2}


@pytest.mark.parametrize(
    ("spread", "parallel", "ranks"),
    [
        pytest.param((1, 1, 0), {}, 1, id="one rank"),
        pytest.param((4, 1, 3), FOUR, 4, id="tensor parallel"),
        pytest.param((8, 1, 3), EIGHT, 8, id="two stages"),
        pytest.param((8, 2, 5), EIGHT, 4, id="a stage on each of two hosts"),
        pytest.param((8, 1, 5), FOUR | {"data_parallel_size": 2}, 8, id="mixture of experts"),
        pytest.param((3, 2, 0), {"tensor_parallel_size": 3}, 1, id="hosts that differ"),
    ],
)
def test_every_rank_on_this_host_counts(
    monkeypatch: pytest.MonkeyPatch, spread: Spread, parallel: dict[str, int], ranks: int
) -> None:
    config = engine(monkeypatch, spread, parallel=parallel, kv=SETTINGS)
    assert planned_slabs(config) == ((ranks, 16 * GIB, KV),)


@pytest.mark.parametrize(
    ("role", "here"),
    [
        ("ec_both", ((1, 16 * GIB, ENCODER), (1, GIB, STAGING))),
        ("ec_producer", ((1, GIB, STAGING),)),
        ("ec_consumer", ((1, 16 * GIB, ENCODER),)),
    ],
)
def test_encoder_outputs_take_memory_once_in_an_engine(
    monkeypatch: pytest.MonkeyPatch, role: str, here: Any
) -> None:
    config = engine(monkeypatch, (4, 1, 3), parallel=FOUR, kv=SETTINGS, ec=SETTINGS, ec_role=role)
    assert planned_slabs(config) == ((4, 16 * GIB, KV), *here)
    alone = engine(monkeypatch, (4, 1, 3), parallel=FOUR, ec=SETTINGS, ec_role=role)
    assert planned_slabs(alone) == here


@pytest.mark.parametrize(
    ("spread", "parallel", "engines"),
    [
        pytest.param((8, 2, 3), EIGHT, 1, id="the engine's first host"),
        pytest.param((8, 2, 4), EIGHT, 0, id="its second host"),
        pytest.param((8, 1, 4), FOUR | {"data_parallel_size": 2}, 2, id="two engines here"),
        pytest.param((8, 2, 4), FOUR | {"data_parallel_size": 2}, 1, id="one on each host"),
        pytest.param((16, 4, 9), EIGHT | {"data_parallel_size": 2}, 1, id="two on four hosts"),
        pytest.param((16, 4, 13), EIGHT | {"data_parallel_size": 2}, 0, id="the last of these"),
    ],
)
def test_encoder_outputs_are_on_the_host_of_the_first_rank(
    monkeypatch: pytest.MonkeyPatch, spread: Spread, parallel: dict[str, int], engines: int
) -> None:
    config = engine(monkeypatch, spread, parallel=parallel, ec=SETTINGS)
    assert planned_slabs(config) == ((engines, 16 * GIB, ENCODER), (engines, GIB, STAGING))


def test_settings_of_the_other_connector_are_checked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    config = engine(monkeypatch, (1, 1, 0), kv=SETTINGS, ec={"bucket": "bkt", "host_bytes": -1})
    with pytest.raises(ConfigError, match="host_bytes"):
        planned_slabs(config)


def test_other_connectors_are_none_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    config = engine(monkeypatch, (2, 1, 0), kv=SETTINGS, ec=SETTINGS)
    config.kv_transfer_config.kv_connector = "OffloadingConnector"
    config.ec_transfer_config.ec_connector = "ECExampleConnector"
    assert planned_slabs(config) == ()
