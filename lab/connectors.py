"""The KV connector of a running engine, exchanged for another one or for none.

Two engines with the same code can differ by several per cent for as long as they run. One engine
whose connector comes and goes does not.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from lab.neighbours import Neighbour


def use(engine: Any, connector: str) -> None:
    """For `Engine.call`, of an engine that has a connector and no request: serve with it ("own"),
    with one whose hooks do nothing ("empty"), or with "none".

    vLLM looks for its connector in each step, so "none" is as good as an engine that was started
    without one. Threads and processes of its own connector stay.
    """
    scheduler = engine.engine_core.engine_core.scheduler
    if not hasattr(scheduler, "connectors"):
        config, caches = engine.vllm_config, scheduler.kv_cache_config
        scheduler.connectors = {
            "own": (scheduler.connector, kv_transfer_state._KV_CONNECTOR_AGENT),
            "empty": tuple(Neighbour(config, role, caches) for role in KVConnectorRole),
            "none": (None, None),
        }
    mine, workers = scheduler.connectors[connector]
    scheduler.connector, kv_transfer_state._KV_CONNECTOR_AGENT = mine, workers
