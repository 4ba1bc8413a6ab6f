"""Host memory of a worker's tier, among all the tiers on its host."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from s3kv.config import Config
from s3kv.device.selection import memory_near
from s3kv.host.limits import Plan
from s3kv.host.placement import beside_the_model
from s3kv.io.client import IoClient
from s3kv.io.tier import Tier, open_tier
from s3kv.io.wire import Handshake

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def open_worker_tier(
    vllm_config: VllmConfig,
    nbytes: int,
    handshake: Handshake,
    device: torch.device,
    *,
    wait: Callable[[IoClient], bool | None] | None,
) -> Tier:
    """A tier in memory near `device`. With a model on the CPU, its I/O process may run on the cores
    that vLLM leaves free. Parameters, blocking and errors as of `open_tier`."""
    return open_tier(
        nbytes,
        handshake,
        node=memory_near(device),
        processors=beside_the_model() if device.type == "cpu" else None,
        wait=wait,
        planned=planned_slabs(vllm_config),
    )


def planned_slabs(vllm_config: VllmConfig) -> Plan:
    """The slabs of both connectors that an engine's processes make on this worker's host.
    vLLM's world group, and so the number, includes the data-parallel ranks of a mixture of experts.
    vLLM runs those of other models as independent engines."""
    from vllm.distributed.parallel_state import get_node_count, get_world_group

    kv, ec = vllm_config.kv_transfer_config, vllm_config.ec_transfer_config
    world, size = get_world_group(), vllm_config.parallel_config.world_size
    ranks = world.world_size // get_node_count()  # not more than there are, if hosts differ
    planned: list[tuple[int, int, str]] = []
    if kv is not None and kv.kv_connector == "S3KVConnector":
        config = Config.parse(kv.kv_connector_extra_config, "kv_connector_extra_config")
        planned.append((ranks, config.host_bytes, "host_bytes, per rank"))
    if ec is not None and ec.ec_connector == "S3ECConnector":
        config = Config.parse(ec.ec_connector_extra_config, "ec_connector_extra_config")
        engines = max(ranks // size, int(world.rank % size < ranks))  # with the first rank here
        planned += [
            (engines, config.host_bytes, "host_bytes of encoder outputs")
        ] * ec.is_ec_consumer
        planned += [(engines, config.staging_bytes, "encoder uploads")] * ec.is_ec_producer
    return tuple(planned)
