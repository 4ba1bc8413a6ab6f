"""What s3kv relies on of vLLM, held against the vLLM that is installed: names and fields, and every
hook that a connector or the tier has. A new hook of vLLM's fails, too.

A failure here is not a bug yet. It names something that vLLM has moved, and our files to read again
with that in mind; then this table is brought up to date. Versions in the tables are those in which
the thing first appeared.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from typing import Any, get_args

import msgspec
import pytest
import vllm
import yaml
from vllm import envs
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager

from s3kv.config import Config
from s3kv.connectors.ec import S3ECConnector
from s3kv.connectors.guard import Guarded
from s3kv.connectors.kv import S3KVConnector
from s3kv.connectors.offload_tier import S3Tier
from tests.project import ROOT
from tests.versions import VERSION, newer, since

CONNECTOR = "s3kv/connectors/kv.py"
SCHEDULER = "s3kv/connectors/kv_scheduler.py"
ADAPTERS = "s3kv/connectors/adapter_loads.py"
REQUESTS = "s3kv/connectors/request_params.py"
BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
STATS = "vllm.distributed.kv_transfer.kv_connector.v1.metrics"
FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory"
CACHE = "vllm.v1.kv_cache_interface"
HASHES = "vllm.v1.core.kv_cache_utils"
LORA = "vllm.lora.worker_manager"
STEP = "vllm.v1.core.sched.output"
GROUPS = "vllm.distributed.parallel_state"

# Dataclass -> the fields we read or set, but for those with tables of all fields in kv_relevance.
FIELDS = {
    f"{STEP}:KVConnectorBlockState": "get_block_ids boundary_state_offloads",
    "vllm.v1.outputs:KVConnectorOutput": "finished_recving failed_recving kv_connector_worker_meta",
    "vllm.v1.outputs:ECConnectorOutput": "ec_connector_worker_meta",
    f"{BASE}:KVConnectorTransferResults": "finished_sending finished_recving failed_recving",
    f"{CACHE}:FullAttentionSpec": "block_size prefix_cacheable prefix_replay_tokens",
    f"{CACHE}:UniformTypeKVCacheSpecs": "kv_cache_specs",
    f"{STATS}:KVConnectorStats": "data",
    "vllm.config:VllmConfig": "max_concurrent_batches",
    "vllm.multimodal.inputs:MultiModalFieldElem": "data",
}

# Things we call or subclass -> their parameters without self; None: it only has to be there.
CALLS: dict[str, str | None] = {
    "vllm.v1.core.block_pool:BlockPool.get_cached_block": "block_hash kv_cache_group_ids",
    "vllm.v1.core.block_pool:BlockPool.evict_blocks": "block_ids",
    f"{HASHES}:BlockHashListWithBlockSize.__init__": "block_hashes hash_block_size "
    "target_block_size",
    f"{HASHES}:make_block_hash_with_group_id": "block_hash group_id",
    f"{HASHES}:resolve_kv_cache_block_sizes": "kv_cache_config vllm_config",
    f"{HASHES}:resolve_none_hash_seed": "hash_fn",
    f"{HASHES}:_gen_lora_extra_hash_keys": "request",
    f"{HASHES}:_gen_prompt_embeds_extra_hash_keys": "request start_token_idx end_token_idx",
    "vllm.config:ModelConfig.get_inputs_embeds_size": "",
    "vllm.config:ModelConfig.try_get_generation_config": "",
    "vllm.config:KVTransferConfig.is_kv_producer": None,
    "vllm.config:KVTransferConfig.is_kv_consumer": None,
    "vllm.config:VllmConfig.use_v2_model_runner": None,
    "vllm.v1.metrics.utils:create_metric_per_engine": "metric per_engine_labelvalues",
    f"{STATS}:KVConnectorPromMetrics.__init__": "vllm_config metric_types labelnames "
    "per_engine_labelvalues",
    f"{STATS}:KVConnectorPromMetrics.observe": "transfer_stats_data engine_idx",
    f"{STATS}:KVConnectorStats.aggregate": "other",
    f"{STATS}:KVConnectorStats.reduce": "",
    f"{STATS}:KVConnectorStats.is_empty": "",
    f"{BASE}:KVConnectorWorkerMetadata.aggregate": "other",
    "vllm.platforms:Platform.is_fp8_fnuz": None,
    f"{GROUPS}:get_tp_group": "",
    f"{GROUPS}:get_pp_group": "",
    f"{GROUPS}:get_world_group": "",
    f"{GROUPS}:get_node_count": "",
    f"{FACTORY}:KVConnectorFactory.register_connector": "name module_path class_name",
    f"{FACTORY}:KVConnectorFactory._registry": None,
    f"{LORA}:WorkerLoRAManager._load_adapter": "lora_request",
    f"{LORA}:WorkerLoRAManager.list_adapters": "",
    f"{CACHE}:KVCacheConfig.needs_kv_cache_zeroing": None,
}


def users_of(name: str) -> str:
    """Our files with this name."""
    files = sorted((ROOT / "s3kv" / "connectors").glob("*.py"))
    named = [str(f.relative_to(ROOT)) for f in files if re.search(rf"\b{name}\b", f.read_text())]
    return " and ".join(named)


def moved(what: str, read_again: str) -> str:
    return f"vLLM {vllm.__version__}: {what}. Read {read_again} again with that in mind"


def parameters(function: Any) -> tuple[str, ...]:
    if isinstance(function, property):
        return ()
    names = []
    for parameter in inspect.signature(function).parameters.values():
        stars = {inspect.Parameter.VAR_KEYWORD: "**", inspect.Parameter.VAR_POSITIONAL: "*"}
        names.append(stars.get(parameter.kind, "") + parameter.name)
    return tuple(name for name in names if name != "self")


def find(module: str, path: str) -> Any:
    thing: Any = importlib.import_module(module)
    for name in path.split("."):
        thing = getattr(thing, name)
    return thing


def test_the_block_pool_reaches_us() -> None:
    """vLLM hands over the whole cache manager, and its default takes the pool out of it."""

    class Manager:
        block_pool = object()

    class Connector:
        pool: object = None

        def bind_gpu_block_pool(self, gpu_block_pool: object) -> None:
            self.pool = gpu_block_pool

    connector = Connector()
    KVConnectorBase_V1.bind_kv_cache_manager(connector, Manager())  # type: ignore[arg-type]
    assert connector.pool is Manager.block_pool, moved("the block pool is not bound", SCHEDULER)


@pytest.mark.parametrize("name", FIELDS)
def test_fields_we_read(name: str) -> None:
    cls = find(*name.split(":"))
    there = {field.name for field in dataclasses.fields(cls)}
    for field in FIELDS[name].split():
        has_it = field in there or hasattr(cls, field)
        assert has_it, moved(f"{name} has no {field}", users_of(field))


@pytest.mark.parametrize("name", CALLS)
def test_things_we_call(name: str) -> None:
    last, expected = re.split(r"[.:]", name)[-1], CALLS[name]
    try:
        thing = find(*name.split(":"))
    except AttributeError:
        pytest.fail(moved(f"{name} is gone", users_of(last)))
    if expected is not None:
        assert parameters(thing) == (*expected.split(),), moved(
            f"{name} has other parameters", users_of(last)
        )


def test_the_variables_of_the_deployment_are_ones_vllm_reads() -> None:
    """Its arguments are in tests/system/deploy/test_kubernetes.py."""
    deployment = yaml.safe_load((ROOT / "deploy/kubernetes/base/deployment.yaml").read_text())
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    ours = {v["name"] for v in container["env"] if v["name"].startswith("VLLM_")}
    assert ours
    assert ours <= set(envs.environment_variables)


def test_a_request_has_what_we_read() -> None:
    from vllm import SamplingParams
    from vllm.v1.request import Request

    request = Request("one", [1, 2, 3], SamplingParams(), None)
    assert request.request_id == "one"
    read = "block_hashes skip_reading_prefix_cache lora_request mm_features kv_transfer_params"
    for name in read.split():
        assert hasattr(request, name), moved(f"Request has no {name}", SCHEDULER)
    assert request.block_hashes is request.block_hashes, moved(
        "Request.block_hashes is a new list each time, and we keep the growing one", SCHEDULER
    )
    params = {"s3kv": {"save": False}}
    sampling = SamplingParams(extra_args={"kv_transfer_params": params})
    assert Request("two", [1], sampling, None).kv_transfer_params == params


@since(0, 32, "hints of a request")
def test_vllm_defines_no_action_of_a_hint() -> None:
    """So there is nothing that s3kv could do."""
    hints = importlib.import_module("vllm.v1.kv_hints")
    defined = set(hints.__all__)
    assert defined == {"KvHintAction", "KvHintsEnvelope"}, moved(f"hints are {defined}", REQUESTS)
    action = {field.name: field.type for field in msgspec.structs.fields(hints.KvHintAction)}
    assert (action["action_type"], action["payload"]) == (str, dict[str, Any]), moved(
        "hints have actions of vLLM's own", REQUESTS
    )


def test_every_load_of_an_adapter_goes_through_what_we_observe() -> None:
    """Both managers add adapters with `_load_adapter`, and neither in another way."""
    from vllm.lora import worker_manager as module

    source = inspect.getsource(module)
    assert source.count("from_local_checkpoint(") == 1, moved("adapters load elsewhere", ADAPTERS)
    for manager in (module.WorkerLoRAManager, module.LRUCacheWorkerLoRAManager):
        assert "self._load_adapter(" in inspect.getsource(manager.add_adapter)
    assert "_load_adapter" not in vars(module.LRUCacheWorkerLoRAManager)
    load = inspect.getsource(module.WorkerLoRAManager._load_adapter)
    assert "from_local_checkpoint(" in load
    assert "get_adapter_absolute_path(lora_request.lora_path)" in load


def test_what_tells_adapters_apart_in_vllms_own_cache() -> None:
    from vllm.lora.request import LoRARequest

    from s3kv.connectors.adapter_loads import hashed_name

    names = {
        hashed_name(LoRARequest(name, number, path))
        for name, number, path in (("a", 1, "/x"), ("a", 2, "/x"), ("b", 1, "/x"), ("a", 1, "/y"))
    }
    assert len(names) == 3, moved("adapters' hashes", ADAPTERS)


def test_doctor_knows_every_hash_of_prefixes() -> None:
    from vllm.config.cache import PrefixCachingHashAlgo

    from s3kv.cli.doctor.command import doctor

    (known,) = (option.type for option in doctor.params if option.name == "hash_algo")
    assert set(get_args(PrefixCachingHashAlgo)) <= set(known.choices)


def test_uploads_have_less_time_than_vllm_gives_a_worker_by_default() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", raising=False)
        assert Config(bucket="bkt").drain_timeout_s < envs.VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS


def test_the_version_is_one_we_claim() -> None:
    assert (0, 31) <= VERSION < (0, 34), moved("outside the range in pyproject.toml", CONNECTOR)


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
    "release_kv_caches": (0, 34),
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
