"""What s3kv relies on of vLLM besides its hooks, held against the vLLM that is installed.

The hooks are in test_hooks.py.

A failure here is not a bug yet. It says that vLLM has moved something, and which of our files to
read again with that in mind; then this table is brought up to date. Versions in the tables are
those in which the thing first appeared; what is older than all we support has none.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from typing import Any, get_args

import click
import msgspec
import pytest
import vllm
from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from s3kv.config import Config
from tests.versions import VERSION, newer, since

CONNECTOR = "s3kv/connectors/kv.py"
SCHEDULER = "s3kv/connectors/kv_scheduler.py"
MEMORY = "s3kv/connectors/worker_memory.py"
WORKER = "s3kv/connectors/kv_worker.py"
TRANSLATE = "s3kv/connectors/kv_translate.py"
IDENTITY = "s3kv/connectors/identity.py"
MEDIA = "s3kv/connectors/media.py"
LORA = "vllm.lora.worker_manager"
ADAPTERS = "s3kv/connectors/adapter_loads.py"
REQUESTS = "s3kv/connectors/request_params.py"
HASHES = "s3kv/connectors/request_hashes.py"
METRICS = "s3kv/connectors/metrics.py"
GROUPS = "s3kv/connectors/kv_groups.py"
EC_SCHEDULER = "s3kv/connectors/ec_scheduler.py"
EC_TRANSLATE = "s3kv/connectors/ec_translate.py"

BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
STATS = "vllm.distributed.kv_transfer.kv_connector.v1.metrics"
CACHE = "vllm.v1.kv_cache_interface"

# Dataclass -> the fields we read or set.
FIELDS: list[tuple[str, str, set[str], str]] = [
    (
        "vllm.v1.core.sched.output",
        "SchedulerOutput",
        {
            "scheduled_new_reqs",
            "scheduled_cached_reqs",
            "num_scheduled_tokens",
            "kv_cache_block_copies",
            "new_block_ids_to_zero",
            "kv_connector_block_state",
        },
        TRANSLATE,
    ),
    (
        "vllm.v1.core.sched.output",
        "KVConnectorBlockState",
        {"get_block_ids", "boundary_state_offloads"},
        TRANSLATE,
    ),
    (
        "vllm.v1.core.sched.output",
        "NewRequestData",
        {"req_id", "mm_features", "block_ids", "num_computed_tokens"},
        TRANSLATE,
    ),
    (
        "vllm.v1.core.sched.output",
        "CachedRequestData",
        {"req_ids", "resumed_req_ids", "new_block_ids", "num_computed_tokens"},
        TRANSLATE,
    ),
    (
        "vllm.v1.outputs",
        "KVConnectorOutput",
        {"finished_recving", "failed_recving", "kv_connector_worker_meta"},
        SCHEDULER,
    ),
    (
        BASE,
        "KVConnectorTransferResults",
        {"finished_sending", "finished_recving", "failed_recving"},
        CONNECTOR,
    ),
    ("vllm.v1.outputs", "ECConnectorOutput", {"ec_connector_worker_meta"}, EC_SCHEDULER),
    (
        CACHE,
        "KVCacheConfig",
        {"num_blocks", "kv_cache_groups", "kv_cache_layout", "kv_tp_replicas"},
        TRANSLATE,
    ),
    (CACHE, "KVCacheGroupSpec", {"layer_names", "kv_cache_spec", "is_eagle_group"}, WORKER),
    (
        CACHE,
        "FullAttentionSpec",
        {"block_size", "prefix_cacheable", "prefix_replay_tokens"},
        TRANSLATE,
    ),
    (CACHE, "UniformTypeKVCacheSpecs", {"kv_cache_specs"}, TRANSLATE),
    (STATS, "KVConnectorStats", {"data"}, METRICS),
    (
        "vllm.config",
        "KVTransferConfig",
        {"kv_connector_extra_config", "kv_load_failure_policy"},
        CONNECTOR,
    ),
    (
        "vllm.config",
        "CacheConfig",
        {"prefix_caching_hash_algo", "cache_dtype", "mamba_cache_mode", "use_replayssm"},
        TRANSLATE,
    ),
    ("vllm.config.mamba", "MambaConfig", {"enable_stochastic_rounding"}, GROUPS),
    ("vllm.config", "LoRAConfig", {"enable_tower_connector_lora"}, EC_TRANSLATE),
    ("vllm.config", "DeviceConfig", {"device_type"}, TRANSLATE),
    (
        "vllm.config",
        "ParallelConfig",
        {
            "world_size",
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "decode_context_parallel_size",
            "prefill_context_parallel_size",
        },
        TRANSLATE,
    ),
    (
        "vllm.config",
        "ModelConfig",
        {
            "model",
            "revision",
            "code_revision",
            "dtype",
            "quantization",
            "hf_config",
            "model_impl",
            "disable_sliding_window",
            "max_model_len",
            "override_generation_config",
            "seed",
            "multimodal_config",
        },
        IDENTITY,
    ),
    (
        "vllm.config",
        "VllmConfig",
        {
            "speculative_config",
            "lora_config",
            "load_config",
            "compilation_config",
            "mamba_config",
            "max_concurrent_batches",
        },
        IDENTITY,
    ),
    ("vllm.config", "ModelConfig", {"enable_sleep_mode"}, WORKER),
    ("vllm.config", "CompilationConfig", {"static_forward_context"}, IDENTITY),
    ("vllm.config", "LoadConfig", {"load_format"}, IDENTITY),
    (
        "vllm.multimodal.inputs",
        "MultiModalFeatureSpec",
        {"data", "modality", "identifier", "mm_position"},
        MEDIA,
    ),
    ("vllm.multimodal.inputs", "PlaceholderRange", {"offset", "length", "is_embed"}, MEDIA),
    ("vllm.multimodal.inputs", "MultiModalFieldElem", {"data"}, MEDIA),
]
NEWER_FIELDS: list[tuple[tuple[int, int], str, str, set[str], str]] = [
    ((0, 32), CACHE, "KVCacheConfig", {"hash_block_size"}, TRANSLATE),
]

# Things we call or subclass -> their parameters without self; None: it only has to be there.
CALLS: list[tuple[str, str, tuple[str, ...] | None, str]] = [
    (
        "vllm.v1.core.block_pool",
        "BlockPool.get_cached_block",
        ("block_hash", "kv_cache_group_ids"),
        SCHEDULER,
    ),
    (
        "vllm.v1.core.kv_cache_utils",
        "resolve_kv_cache_block_sizes",
        ("kv_cache_config", "vllm_config"),
        TRANSLATE,
    ),
    ("vllm.v1.core.kv_cache_utils", "resolve_none_hash_seed", ("hash_fn",), TRANSLATE),
    ("vllm.config", "ModelConfig.get_inputs_embeds_size", (), EC_TRANSLATE),
    (
        "vllm.v1.metrics.utils",
        "create_metric_per_engine",
        ("metric", "per_engine_labelvalues"),
        METRICS,
    ),
    (
        STATS,
        "KVConnectorPromMetrics.__init__",
        ("vllm_config", "metric_types", "labelnames", "per_engine_labelvalues"),
        METRICS,
    ),
    (STATS, "KVConnectorPromMetrics.observe", ("transfer_stats_data", "engine_idx"), METRICS),
    (STATS, "KVConnectorStats.aggregate", ("other",), METRICS),
    (STATS, "KVConnectorStats.reduce", (), METRICS),
    (STATS, "KVConnectorStats.is_empty", (), METRICS),
    (BASE, "KVConnectorWorkerMetadata.aggregate", ("other",), "s3kv/connectors/kv_translate.py"),
    ("vllm.config", "KVTransferConfig.is_kv_producer", None, CONNECTOR),
    ("vllm.config", "KVTransferConfig.is_kv_consumer", None, CONNECTOR),
    ("vllm.config", "ModelConfig.try_get_generation_config", (), IDENTITY),
    ("vllm.platforms", "Platform.is_fp8_fnuz", None, IDENTITY),
    ("vllm.distributed.parallel_state", "get_tp_group", (), WORKER),
    ("vllm.distributed.parallel_state", "get_pp_group", (), WORKER),
    ("vllm.distributed.parallel_state", "get_world_group", (), MEMORY),
    ("vllm.distributed.parallel_state", "get_node_count", (), MEMORY),
    (
        "vllm.distributed.kv_transfer.kv_connector.factory",
        "KVConnectorFactory.register_connector",
        ("name", "module_path", "class_name"),
        "s3kv/connectors/plugin.py",
    ),
    (
        "vllm.distributed.kv_transfer.kv_connector.factory",
        "KVConnectorFactory._registry",
        None,
        "s3kv/connectors/plugin.py",
    ),
    ("vllm.lora.request", "LoRARequest.load_inplace", None, ADAPTERS),
    (LORA, "WorkerLoRAManager._load_adapter", ("lora_request",), ADAPTERS),
    (LORA, "WorkerLoRAManager.list_adapters", (), ADAPTERS),
    ("vllm.v1.core.kv_cache_utils", "_gen_lora_extra_hash_keys", ("request",), ADAPTERS),
    (
        "vllm.v1.core.kv_cache_utils",
        "_gen_prompt_embeds_extra_hash_keys",
        ("request", "start_token_idx", "end_token_idx"),
        HASHES,
    ),
    (CACHE, "MLAAttentionSpec", None, TRANSLATE),
    (CACHE, "KVCacheConfig.needs_kv_cache_zeroing", None, TRANSLATE),
    ("vllm.config", "VllmConfig.use_v2_model_runner", None, TRANSLATE),
]


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


@pytest.mark.parametrize(("module", "name", "wanted", "read_again"), FIELDS)
def test_fields_we_read(module: str, name: str, wanted: set[str], read_again: str) -> None:
    cls = find(module, name)
    there = {field.name for field in dataclasses.fields(cls)}
    missing = {field for field in wanted - there if not hasattr(cls, field)}
    assert not missing, moved(f"{name} has no {sorted(missing)}", read_again)


@pytest.mark.parametrize(("first", "module", "name", "wanted", "read_again"), NEWER_FIELDS)
def test_newer_fields_we_read(
    first: tuple[int, int], module: str, name: str, wanted: set[str], read_again: str
) -> None:
    if first > VERSION:
        pytest.skip(newer(", ".join(f"`{name}.{field}`" for field in sorted(wanted))))
    test_fields_we_read(module, name, wanted, read_again)


@pytest.mark.parametrize(("module", "path", "expected", "read_again"), CALLS)
def test_things_we_call(
    module: str, path: str, expected: tuple[str, ...] | None, read_again: str
) -> None:
    try:
        thing = find(module, path)
    except AttributeError:
        pytest.fail(moved(f"{module}.{path} is gone", read_again))
    if expected is not None:
        assert parameters(thing) == expected, moved(f"{path} has other parameters", read_again)


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
    assert isinstance(known, click.Choice)
    assert set(get_args(PrefixCachingHashAlgo)) <= set(known.choices)


@since(0, 32, "`CacheHitSource`")
def test_the_tiers_we_name_exist() -> None:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    for tier in ("HOST", "EXTERNAL_UNSPECIFIED"):
        assert hasattr(CacheHitSource, tier), moved(f"CacheHitSource has no {tier}", CONNECTOR)


def test_uploads_have_less_time_than_vllm_gives_a_worker_by_default() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", raising=False)
        assert Config(bucket="bkt").drain_timeout_s < envs.VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS


def test_the_version_is_one_we_claim() -> None:
    assert (0, 31) <= VERSION < (0, 34), moved("outside the range in pyproject.toml", CONNECTOR)
