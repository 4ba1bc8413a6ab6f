"""Every hook that a connector or the tier has, held against the vLLM that is installed.

The hooks and their parameters are those of our classes. A hook of theirs that is new fails, too. A
failure is not a bug yet; see test_vllm_api.py.
"""

from __future__ import annotations

import pytest
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager

from s3kv.connectors.ec import S3ECConnector
from s3kv.connectors.guard import Guarded
from s3kv.connectors.kv import S3KVConnector
from s3kv.connectors.offload_tier import S3Tier
from tests.contract.test_vllm_api import moved, parameters, users_of
from tests.versions import VERSION, newer

BASES: dict[type, tuple[type, ...]] = {
    S3KVConnector: (KVConnectorBase_V1, SupportsHMA),
    S3ECConnector: (ECConnectorBase,),
    S3Tier: (SecondaryTierManager,),
}
CALLED: dict[type, set[str]] = {
    S3KVConnector: {"__init__", "has_connector_metadata", "_get_connector_metadata", "role"},
    S3ECConnector: {"__init__", "is_consumer", "is_producer", "role"},
    S3Tier: set(),
}
"""Hooks that we call, and do not define ourselves."""
SINCE = {
    "get_external_cache_hit_sources": (0, 32),
    "supports_sleep_mode": (0, 33),
    "unregister_kv_caches": (0, 33),
    "restore_kv_caches": (0, 33),
}
# Hooks whose defaults are right for s3kv, each read in every version it is in.
LEFT_ALONE: dict[type, set[str]] = {
    S3KVConnector: {
        # `get_transfer_results` has both, and by request.
        *("get_block_ids_with_load_errors", "get_finished"),
        *("bind_connector_metadata", "bind_kv_cache_manager", "clear_connector_metadata"),
        *("finish_forward", "get_finished_count", "get_kv_connector_kv_cache_events"),
        *("get_loaded_kv_cache_group_ids", "get_mem_pool_context", "get_required_kvcache_layout"),
        *("has_pending_block_frees", "register_finished_partial_tail", "reset_capture_state"),
        *("requires_piecewise_for_cudagraph", "set_host_xfer_buffer_ops"),
        "supports_divergent_local_hybrid_hits",
    },
    S3ECConnector: {
        *("clear_connector_metadata", "get_finished", "has_pending_push_work", "register_caches"),
        *("start_save_caches", "start_worker_services", "take_unavailable_requests"),
        "update_state_after_free",
    },
    S3Tier: {
        *("config_info", "config_info_keys", "has_pending_work", "serve_external_requests"),
        # What a tier may read.
        *(name for name, it in vars(SecondaryTierManager).items() if isinstance(it, property)),
    },
}


def public(*classes: type) -> set[str]:
    """What can be called, and properties, but for what is not vLLM's."""
    return {
        name
        for cls in classes
        for name, it in vars(cls).items()
        if not name.startswith("_") and name not in vars(Guarded)
        if isinstance(it, property) or callable(getattr(it, "__func__", it))
    }


@pytest.mark.parametrize(
    ("ours", "hook"),
    [(ours, hook) for ours in BASES for hook in sorted(public(ours) | CALLED[ours])],
)
def test_a_hook_has_the_parameters_it_was_written_for(ours: type, hook: str) -> None:
    theirs = next((vars(base)[hook] for base in BASES[ours] if hook in vars(base)), None)
    if theirs is None and SINCE.get(hook, (0, 0)) > VERSION:
        pytest.skip(newer(f"`{hook}`"))
    assert theirs is not None, moved(f"{hook} is a hook no more", users_of(hook))
    if isinstance(theirs, classmethod):
        theirs = theirs.__get__(None, ours)
    assert parameters(theirs) == parameters(getattr(ours, hook)), moved(
        f"{hook} has other parameters", users_of(hook)
    )


@pytest.mark.parametrize("ours", BASES)
def test_no_hook_of_theirs_is_unknown(ours: type) -> None:
    assert not public(ours) & LEFT_ALONE[ours]
    unknown = public(*BASES[ours]) - public(ours) - CALLED[ours] - LEFT_ALONE[ours]
    assert not unknown, moved(f"new hooks {sorted(unknown)}: are their defaults right?", "ours")
    assert not getattr(ours, "__abstractmethods__", None)
