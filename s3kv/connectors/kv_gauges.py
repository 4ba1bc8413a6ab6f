"""The KV scheduler's counts and state in the keys of the metrics. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from s3kv.connectors.metrics import Values, breaker_state, misses
from s3kv.metrics import KV_METRICS
from s3kv.planning.kv import KVPlanner


def kv_words(counters: Mapping[str, int]) -> dict[str, int]:
    """Fetches and uploads are left out: they are counted where they happen, on every rank."""
    words = {n: v for n, v in counters.items() if not n.startswith(("fetch_", "upload_"))}
    dropped, without_slot = words.pop("saves_dropped", 0), words.pop("saves_without_slot", 0)
    words["saves_dropped|inflight"] = dropped - without_slot
    words["saves_dropped|memory_full"] = without_slot
    return words | misses(counters)


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
        **breaker_state(planner.ledger.breaker.state.value, KV_METRICS),
    }
