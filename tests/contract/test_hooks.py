"""Every hook that either connector has, held against the vLLM that is installed.

What is pinned is derived from our classes and theirs: a hook of ours that is missing from the table
fails, and so does a new one of theirs. A failure is not a bug yet; see test_vllm_api.py.
"""

from __future__ import annotations

from typing import Any

import pytest
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

from s3kv.connectors.ec import S3ECConnector
from s3kv.connectors.kv import S3KVConnector
from tests.contract.test_vllm_api import (
    CONNECTOR,
    EC_SCHEDULER,
    METRICS,
    SCHEDULER,
    WORKER,
    moved,
    parameters,
)
from tests.versions import VERSION, newer

EC_CONNECTOR = "s3kv/connectors/ec.py"
EC_WORKER = "s3kv/connectors/ec_worker.py"
EC_METRICS = "s3kv/connectors/metrics.py"

# Hook -> its parameters, and where to read what we make of it.
HOOKS: dict[str, tuple[tuple[str, ...], str]] = {
    "__init__": (("vllm_config", "role", "kv_cache_config"), CONNECTOR),
    # worker
    "register_kv_caches": (("kv_caches",), WORKER),
    "get_handshake_metadata": ((), WORKER),
    "supports_sleep_mode": (("kv_transfer_config",), CONNECTOR),
    "unregister_kv_caches": ((), WORKER),
    "restore_kv_caches": ((), WORKER),
    "handle_preemptions": (("kv_connector_metadata",), WORKER),
    "start_load_kv": (("forward_context", "**kwargs"), WORKER),
    "wait_for_layer_load": (("layer_name",), CONNECTOR),
    "save_kv_layer": (("layer_name", "kv_layer", "attn_metadata", "**kwargs"), CONNECTOR),
    "wait_for_save": ((), WORKER),
    "get_transfer_results": (("finished_req_ids",), WORKER),
    "build_connector_worker_meta": ((), WORKER),
    # scheduler
    "set_xfer_handshake_metadata": (("metadata",), SCHEDULER),
    "set_xfer_handshake_metadata_pp_aware": (("metadata",), SCHEDULER),
    "bind_gpu_block_pool": (("gpu_block_pool",), SCHEDULER),
    "on_new_request": (("request",), SCHEDULER),
    "get_num_new_matched_tokens": (("request", "num_computed_tokens"), SCHEDULER),
    "update_state_after_alloc": (("request", "blocks", "num_external_tokens"), SCHEDULER),
    "get_external_cache_hit_sources": (("request", "num_external_tokens"), SCHEDULER),
    "build_connector_meta": (("scheduler_output",), SCHEDULER),
    "update_connector_output": (("connector_output",), SCHEDULER),
    "request_finished": (("request", "block_ids"), SCHEDULER),
    "request_finished_all_groups": (("request", "block_ids"), SCHEDULER),
    "requires_kv_delivery": ((), CONNECTOR),
    "has_pending_push_work": ((), SCHEDULER),
    "reset_cache": ((), SCHEDULER),
    "take_events": ((), SCHEDULER),
    # both, and the logger's process
    "get_kv_connector_stats": ((), METRICS),
    "shutdown": ((), WORKER),
    "build_kv_connector_stats": (("data",), METRICS),
    "build_prom_metrics": (
        ("vllm_config", "metric_types", "labelnames", "per_engine_labelvalues"),
        METRICS,
    ),
    # Not ours, but we call them.
    "has_connector_metadata": ((), CONNECTOR),
    "_get_connector_metadata": ((), CONNECTOR),
    "role": ((), CONNECTOR),
}
SINCE = {
    "get_external_cache_hit_sources": (0, 32),
    "supports_sleep_mode": (0, 33),
    "unregister_kv_caches": (0, 33),
    "restore_kv_caches": (0, 33),
}

# Hooks whose defaults are right for s3kv, each read in every version it is in.
LEFT_ALONE = {
    # `get_transfer_results` says both, and by request.
    "get_block_ids_with_load_errors",
    "get_finished",
    "bind_connector_metadata",
    "bind_kv_cache_manager",
    "clear_connector_metadata",
    "finish_forward",
    "get_finished_count",
    "get_kv_connector_kv_cache_events",
    "get_loaded_kv_cache_group_ids",
    "get_mem_pool_context",
    "get_required_kvcache_layout",
    "has_pending_block_frees",
    "register_finished_partial_tail",
    "requires_piecewise_for_cudagraph",
    "reset_capture_state",
    "set_host_xfer_buffer_ops",
    "supports_divergent_local_hybrid_hits",
}

ABSTRACT = {
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
}

EC_HOOKS: dict[str, tuple[tuple[str, ...], str]] = {
    "__init__": (("vllm_config", "role"), EC_CONNECTOR),
    # worker
    "bind_connector_metadata": (("connector_metadata",), EC_WORKER),
    "start_load_caches": (("encoder_cache", "**kwargs"), EC_WORKER),
    "save_caches": (("encoder_cache", "mm_hash", "**kwargs"), EC_WORKER),
    "build_connector_worker_meta": ((), EC_WORKER),
    # scheduler
    "ensure_cache_available": (("request", "num_computed_tokens"), EC_SCHEDULER),
    "has_cache_item": (("identifier",), EC_SCHEDULER),
    "update_state_after_alloc": (("request", "index"), EC_SCHEDULER),
    "build_connector_meta": (("scheduler_output",), EC_SCHEDULER),
    "update_connector_output": (("connector_output",), EC_SCHEDULER),
    "request_finished": (("request",), EC_SCHEDULER),
    # both, and the logger's process
    "get_ec_connector_stats": ((), EC_METRICS),
    "shutdown": ((), EC_CONNECTOR),
    "build_ec_connector_stats": (("data",), EC_METRICS),
    "build_prom_metrics": (
        ("vllm_config", "metric_types", "labelnames", "per_engine_labelvalues"),
        EC_METRICS,
    ),
    # Not ours, but we call them.
    "_get_connector_metadata": ((), EC_CONNECTOR),
    "is_consumer": ((), EC_CONNECTOR),
    "is_producer": ((), EC_CONNECTOR),
    "role": ((), EC_CONNECTOR),
}
EC_LEFT_ALONE = {
    "clear_connector_metadata",
    "get_finished",
    "has_pending_push_work",
    "register_caches",
    "start_save_caches",
    "start_worker_services",
    "take_unavailable_requests",
    "update_state_after_free",
}

CONNECTORS: list[tuple[type, tuple[type, ...], dict[str, Any], dict[str, Any], set[str]]] = [
    (S3KVConnector, (KVConnectorBase_V1, SupportsHMA), HOOKS, SINCE, LEFT_ALONE),
    (S3ECConnector, (ECConnectorBase,), EC_HOOKS, {}, EC_LEFT_ALONE),
]
PINNED = [
    pytest.param(
        ours, bases, hook, *hooks[hook], since.get(hook, (0, 0)), id=f"{ours.__name__}.{hook}"
    )
    for ours, bases, hooks, since, _ in CONNECTORS
    for hook in hooks
]


def public(*classes: type) -> set[str]:
    return {name for cls in classes for name in vars(cls) if not name.startswith("_")}


@pytest.mark.parametrize(("ours", "bases", "hook", "expected", "read_again", "since"), PINNED)
def test_hook_has_the_parameters_we_wrote_it_for(
    ours: type,
    bases: tuple[type, ...],
    hook: str,
    expected: tuple[str, ...],
    read_again: str,
    since: tuple[int, int],
) -> None:
    theirs = next((vars(base)[hook] for base in bases if hook in vars(base)), None)
    if theirs is None and since > VERSION:
        pytest.skip(newer(f"`{hook}`"))
    assert theirs is not None, moved(f"{bases[0].__name__}.{hook} is gone", read_again)
    if isinstance(theirs, classmethod):
        theirs = theirs.__get__(None, ours)
    assert parameters(theirs) == expected, moved(f"{hook} has other parameters", read_again)
    assert parameters(getattr(ours, hook)) == expected


@pytest.mark.parametrize(("ours", "bases", "hooks", "since", "left_alone"), CONNECTORS)
def test_every_hook_of_ours_is_pinned_and_none_of_theirs_unknown(
    ours: type, bases: tuple[type, ...], hooks: Any, since: Any, left_alone: set[str]
) -> None:
    assert public(ours) <= set(hooks), f"not pinned: {sorted(public(ours) - set(hooks))}"
    assert not public(ours) & left_alone
    unknown = public(*bases) - set(hooks) - left_alone
    assert not unknown, moved(
        f"new hooks {sorted(unknown)}: is their default right for a cache?", CONNECTOR
    )
    later = {name for name, version in since.items() if version > VERSION}
    uncalled = public(ours) - public(*bases) - later
    assert not uncalled, moved(f"{sorted(uncalled)} are hooks no more", CONNECTOR)


def test_the_abstract_hooks_are_these() -> None:
    assert KVConnectorBase_V1.__abstractmethods__ == ABSTRACT, moved(
        "KVConnectorBase_V1 has other abstract methods", CONNECTOR
    )
    assert SupportsHMA.__abstractmethods__ == {"request_finished_all_groups"}
    assert not S3KVConnector.__abstractmethods__
    assert not S3ECConnector.__abstractmethods__
