"""The KV scheduler's counts and state in the keys of the metrics. Pure."""

from __future__ import annotations

from s3kv.connectors.metrics import Values, breaker_states, with_misses
from s3kv.metrics import KV_METRICS
from s3kv.planning.kv import KVPlanner

KV_SHARES = with_misses(
    {
        # Counted where they happen, on every rank.
        **{name: () for name in KV_METRICS if name.startswith(("fetch_", "upload_"))},
        "saves_dropped": (("saves_dropped|inflight", 1),),
        "saves_without_slot": (("saves_dropped|inflight", -1), ("saves_dropped|memory_full", 1)),
    }
)
"""What the planner's counters are in the table."""

_BREAKER = breaker_states(KV_METRICS)


def kv_gauges(planner: KVPlanner, slot_bytes: int) -> Values:
    """slot_bytes: of one slot on all ranks together."""
    slots = planner.ledger.slots.statistics()
    speed = planner.pace.statistics().prefill_tokens_per_s
    return {
        "slab_bytes|free": slots.free * slot_bytes,
        "slab_bytes|filling": slots.reserved * slot_bytes,
        "slab_bytes|clean": slots.clean * slot_bytes,
        "slab_bytes|dirty": slots.dirty * slot_bytes,
        "slab_pinned_bytes": slots.pinned * slot_bytes,
        # Three digits: it is measured anew with every large step.
        "prefill_tokens_per_s": float(f"{speed:.3g}"),
        **_BREAKER[planner.ledger.breaker.state.value],
    }
