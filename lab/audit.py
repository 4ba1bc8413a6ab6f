"""What an idle engine and its connector still hold, told from within the engine's process.

    engine.call("lab.audit:audit")      what is left once everything has ended
    engine.call("lab.audit:reset", …)   vLLM's reset, with its options

An engine without requests does not step, and without a step the scheduler does not hear of the
uploads that were acknowledged meanwhile. So the audit steps the idle engine itself, whole steps
as the engine makes them, until nothing is under way any more or its time is up.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from vllm.distributed.ec_transfer import get_ec_transfer
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.v1.engine.llm_engine import LLMEngine

from lab.books import check


def audit(engine: LLMEngine, timeout_s: float = 200.0) -> dict[str, Any]:
    """Wait until the connector is at rest, check the planner's books, tell what there is.

    left: what an engine without requests has none of once all has ended, counted. broken: the
    hooks that failed for a bug, of either side. slots: all there are. planner, rank: counters of
    the two sides. With vLLM's OffloadingConnector there is nothing but `left` to report. Raises
    RuntimeError while requests are being served: their outputs would be lost in the steps made
    here.
    """
    connector: Any = engine.engine_core.engine_core.scheduler.connector
    if hasattr(connector, "connector_scheduler"):
        left = _settled(engine, _leftover_rows, timeout_s)
        return {"left": left, "broken": [], "planner": {}, "rank": {}}
    scheduler, worker = _sides(engine)
    left = _settled(engine, _leftovers, timeout_s)
    return _books(left, scheduler, worker) | {
        "slots": scheduler.planner.ledger.table.count,
        "rank": dict(worker._rank.counters),
    }


def audit_items(engine: LLMEngine, timeout_s: float = 200.0) -> dict[str, Any]:
    """The same for the EC connector: no request, lease, fetch or upload may be left."""
    return _books(_settled(engine, _leftover_items, timeout_s), *_item_sides(engine))


def _settled(
    engine: LLMEngine, leftovers: Callable[[LLMEngine], dict[str, int]], timeout_s: float
) -> dict[str, int]:
    """What is left when there is nothing, or when time is up."""
    if engine.has_unfinished_requests():
        raise RuntimeError("requests are being served; audit the engine when they are answered")
    deadline_s = time.monotonic() + timeout_s
    while any((left := leftovers(engine)).values()) and time.monotonic() < deadline_s:
        step_idle(engine)
        time.sleep(0.002)
    return left


def _books(left: dict[str, int], scheduler: Any, worker: Any) -> dict[str, Any]:
    if scheduler.broken is None:
        check(scheduler.planner)
    return {
        "left": left,
        "broken": [side.broken for side in (scheduler, worker) if side.broken is not None],
        "planner": dict(scheduler.planner.counters),
    }


def _item_sides(engine: LLMEngine) -> tuple[Any, Any]:
    scheduler: Any = engine.engine_core.engine_core.scheduler
    return scheduler.ec_connector._scheduler, get_ec_transfer()._worker


def _leftover_items(engine: LLMEngine) -> dict[str, int]:
    scheduler, worker = _item_sides(engine)
    planner, outbox = scheduler.planner, worker._outbox
    # A worker has no hook in steps without tokens, so the ends of its uploads are taken here.
    worker._end_step()
    return {
        "requests": len(planner._requests) + len(scheduler._requests),
        "names": len(planner._names),
        "fetches": planner.ledger.fetches_inflight,
        "pinned": sum(entry.pins > 0 for entry in planner.ledger.table.entries()),
        "uploads": 0 if outbox is None else len(outbox._extents._taken),
    }


def step_idle(engine: LLMEngine) -> None:
    """One engine step although there is nothing to compute."""
    core = engine.engine_core.engine_core
    core.scheduler.has_requests = lambda: True
    try:
        engine.step()
    finally:
        del core.scheduler.has_requests
    while core.batch_queue:
        engine.step()


def reset(engine: LLMEngine, connector: bool) -> bool:
    """vLLM's reset of its own prefix cache, and with `connector` of the connector's too."""
    return bool(engine.reset_prefix_cache(reset_connector=connector))


def _sides(engine: LLMEngine) -> tuple[Any, Any]:
    connector: Any = engine.engine_core.engine_core.scheduler.connector
    return _ours(connector)._scheduler, _ours(get_kv_transfer_group())._worker


def _ours(connector: Any) -> Any:
    """s3kv's, if it is one of several."""
    several = getattr(connector, "sub_connectors", [connector])
    return next(one for one in several if type(one).__name__ == "S3KVConnector")


def _leftovers(engine: LLMEngine) -> dict[str, int]:
    scheduler, worker = _sides(engine)
    planner, rank = scheduler.planner, worker._rank
    slots = planner.ledger.table.statistics()
    return _leftovers_of_the_engine(engine) | {
        "requests": len(planner._requests),
        "orphans": len(planner._orphans),
        "jobs": planner.ledger.fetches_inflight + planner.ledger.saves_inflight,
        "copying_blocks": len(planner.ledger._saving_blocks),
        "pinned": slots.pinned,
        "reserved": slots.reserved,
        "dirty": slots.dirty,
        "rank_orders": rank.busy,
        "rank_loads": len(rank._loading) + len(rank._loaded),
    }


def _leftover_rows(engine: LLMEngine) -> dict[str, int]:
    """rows: those of the primary tier that a copy or a job of a tier uses."""
    connector: Any = engine.engine_core.engine_core.scheduler.connector
    manager = connector.connector_scheduler.manager
    primary = manager.primary_tier
    taken = primary._num_allocated_chunks - len(primary._free_list)
    return _leftovers_of_the_engine(engine) | {
        "requests": len(connector.connector_scheduler._req_status),
        "copies": len(connector.connector_scheduler._jobs),
        "jobs": len(manager._jobs),
        "rows": taken - primary._num_evictable_cache_chunks,
    }


def _leftovers_of_the_engine(engine: LLMEngine) -> dict[str, int]:
    scheduler = engine.engine_core.engine_core.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    return {
        "engine_requests": len(scheduler.requests),
        # One block is vLLM's placeholder and never free.
        "blocks_used": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
    }
