"""Settings of the tier, and the engines it refuses."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import KVTransferConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from lab.offloading import offloading
from s3kv.config import Config
from s3kv.connectors.tier_setup import (
    REPLACED,
    check_requests_are_known,
    check_rows_are_whole,
    engine_config,
    parse_settings,
    row_tensor,
)
from s3kv.errors import ConfigError, UnsupportedError
from s3kv.types import TensorSpec
from tests.contract.configurations import FULL, WINDOW, groups
from tests.contract.test_kv_groups import LOCAL, STATE
from tests.mutants import Patch


@pytest.mark.parametrize("name", REPLACED)
def test_settings_that_are_vllms_are_refused_with_its_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} .* set vLLM's "):
        parse_settings({"bucket": "bucket", name: 1})


def test_unknown_settings_and_a_missing_bucket_are_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'bucket'"):
        parse_settings({"buckt": "bucket"})
    with pytest.raises(ConfigError, match="bucket is missing"):
        parse_settings({})


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({}, None),
        ({"lora_config": object()}, UnsupportedError),
        ({"multimodal_config": SimpleNamespace(language_model_only=False)}, ConfigError),
        ({"multimodal_config": SimpleNamespace(language_model_only=True)}, None),
        ({"enable_prompt_embeds": True}, UnsupportedError),
        ({"policy": "priority"}, UnsupportedError),
        ({"nnodes": 2}, UnsupportedError),
        ({"distributed_executor_backend": "ray"}, UnsupportedError),
    ],
    ids=["plain", "adapters", "images", "images off", "embeddings", "priorities", "hosts", "ray"],
)
def test_engines_whose_keys_leave_out_inputs(
    changes: dict[str, Any], error: type[Exception] | None, tiny_config: Any, monkeypatch: Patch
) -> None:
    for name in {"nnodes", "distributed_executor_backend"} & changes.keys():
        monkeypatch.setattr(tiny_config.parallel_config, name, changes[name])
    plain = {"multimodal_config": None, "enable_prompt_embeds": False, "pooler_config": None}
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(**plain | changes),
        lora_config=changes.get("lora_config"),
        cache_config=tiny_config.cache_config,
        parallel_config=tiny_config.parallel_config,
        aux_output_config=tiny_config.aux_output_config,
        scheduler_config=SimpleNamespace(policy=changes.get("policy", "fcfs")),
    )
    with pytest.raises(error, match="S3KVConnector") if error else contextlib.nullcontext():
        check_requests_are_known(Config(bucket="bucket"), config, None)


def test_states_are_refused_with_drafts(tiny_config: Any, monkeypatch: Patch) -> None:
    monkeypatch.setattr(tiny_config.cache_config, "mamba_cache_mode", "align")
    monkeypatch.setattr(tiny_config, "speculative_config", SimpleNamespace())
    check_requests_are_known(Config(bucket="bucket"), tiny_config, groups(FULL))
    with pytest.raises(UnsupportedError, match="tokens that are rejected later"):
        check_requests_are_known(Config(bucket="bucket"), tiny_config, groups(FULL, STATE))


def test_among_several_connectors_it_is_refused(tiny_config: Any, monkeypatch: Patch) -> None:
    tier = {"type": "S3Tier", "module_path": "s3kv.connectors.offload_tier", "bucket": "bucket"}
    several = {"kv_connector_extra_config": {"connectors": [offloading(tier, 2**20)]}}
    transfer = KVTransferConfig(kv_connector="MultiConnector", kv_role="kv_both", **several)
    monkeypatch.setattr(tiny_config, "kv_transfer_config", transfer)
    with pytest.raises(UnsupportedError, match=r"vllm#46951.*S3KVConnector"):
        MultiConnector(tiny_config, KVConnectorRole.SCHEDULER, groups(FULL))


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize(("spec", "is_whole"), [(STATE, True), (WINDOW, False), (LOCAL, False)])
def test_rows_that_vllm_stores_in_part(blocks: int, spec: Any, is_whole: bool) -> None:
    taken = is_whole or blocks == 1
    with contextlib.nullcontext() if taken else pytest.raises(UnsupportedError, match="windows"):
        check_rows_are_whole(blocks, groups(FULL, spec))


def test_the_configuration_is_that_of_the_constructor_that_calls(tiny_config: Any) -> None:
    def scheduler(vllm_config: Any, kv_cache_config: Any) -> Any:
        return engine_config()

    assert scheduler(tiny_config, "its KV cache's") == (tiny_config, "its KV cache's")
    with set_current_vllm_config(tiny_config):
        assert engine_config() == (tiny_config, None)


@pytest.mark.parametrize(
    ("cached", "computed", "row_bytes", "tensor"),
    [
        ("auto", torch.bfloat16, 6, TensorSpec("kv", "BF16", (3,))),
        ("auto", torch.float32, 8, TensorSpec("kv", "F32", (2,))),
        ("float16", torch.bfloat16, 6, TensorSpec("kv", "F16", (3,))),
        ("fp8", torch.bfloat16, 6, TensorSpec("kv", "U8", (6,))),
        ("auto", torch.bfloat16, 7, TensorSpec("kv", "U8", (7,))),
    ],
)
def test_a_row_has_the_numbers_of_the_cache(
    cached: str, computed: torch.dtype, row_bytes: int, tensor: TensorSpec
) -> None:
    config: Any = SimpleNamespace(
        cache_config=SimpleNamespace(cache_dtype=cached),
        model_config=SimpleNamespace(dtype=computed),
    )
    assert row_tensor(config, row_bytes) == tensor
