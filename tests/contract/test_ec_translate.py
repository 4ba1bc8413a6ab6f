"""Encoder outputs of vLLM's requests as items, and what cannot be served."""

from __future__ import annotations

import hashlib
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.multimodal.inputs import MultiModalFeatureSpec

from s3kv.config import Config
from s3kv.connectors.ec_translate import (
    check_supported,
    item_dtype,
    wanted,
)
from s3kv.connectors.identity import encoder_fingerprint
from s3kv.connectors.media import MediaDigests
from s3kv.errors import ConfigError, UnsupportedError
from tests.contract.pictures import picture, without_tensors
from tests.unit.planning.ec_desk import WIDTH

HASH = "ab" * 32


def vllm_config(**changes: Any) -> Any:
    tree: dict[str, Any] = {
        "model": "model",
        "revision": None,
        "dtype": torch.bfloat16,
        "quantization": None,
        "code_revision": None,
        "seed": 0,
        "model_impl": "auto",
        "disable_sliding_window": False,
        "is_encoder_decoder": False,
        "hf_config": SimpleNamespace(to_dict=lambda: {"hidden_size": WIDTH}),
        "hf_image_processor_config": {"size": 224},
        "get_inputs_embeds_size": lambda: WIDTH,
        "mm_processor_kwargs": None,
        "mm_processor_cache_gb": 4,
        "enable_prefix_caching": True,
        "tensor_parallel_size": 1,
        "data_parallel_size": 1,
        "is_moe": False,
        "prefill_context_parallel_size": 1,
        "enable_tower_connector_lora": None,
        "worker_cls": "auto",
        "worker_extension_cls": "",
    } | changes
    multimodal = SimpleNamespace(**{k: v for k, v in tree.items() if k.startswith("mm_")})
    lora = tree["enable_tower_connector_lora"]
    return SimpleNamespace(
        model_config=SimpleNamespace(
            **tree, multimodal_config=None if tree.get("text_only") else multimodal
        ),
        cache_config=SimpleNamespace(enable_prefix_caching=tree["enable_prefix_caching"]),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=tree["tensor_parallel_size"],
            data_parallel_size=tree["data_parallel_size"],
            pipeline_parallel_size=1,
            prefill_context_parallel_size=tree["prefill_context_parallel_size"],
            data_parallel_rank=0,
            worker_cls=tree["worker_cls"],
            worker_extension_cls=tree["worker_extension_cls"],
        ),
        load_config=SimpleNamespace(load_format="dummy"),
        lora_config=None if lora is None else SimpleNamespace(enable_tower_connector_lora=lora),
        ec_transfer_config=SimpleNamespace(engine_id="engine", mm_encoder_output_widths={}),
        max_concurrent_batches=2,
    )


REFUSED: list[tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = [
    ({}, {"is_encoder_decoder": True}, UnsupportedError, "encoder-decoder"),
    ({}, {"text_only": True}, UnsupportedError, "no encoder"),
    ({}, {"prefill_context_parallel_size": 2}, UnsupportedError, "context_parallel"),
    (
        {"trust_media_names": True},
        {"mm_processor_cache_gb": 0, "enable_prefix_caching": False},
        ConfigError,
        "numbers unnamed media",
    ),
]


@pytest.mark.parametrize(("settings", "changes", "error", "says"), REFUSED)
def test_what_cannot_be_served_rightly_is_refused(
    settings: dict[str, Any], changes: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        check_supported(Config(bucket="bkt", **settings), vllm_config(**changes))
    check_supported(Config(bucket="bkt"), vllm_config())


def test_every_difference_that_matters_is_another_namespace() -> None:
    def fingerprint(**changes: Any) -> dict[str, Any]:
        return encoder_fingerprint(Config(bucket="bkt"), vllm_config(**changes))

    base = fingerprint()
    for change in (
        {"model": "other"},
        {"revision": "r1"},
        {"dtype": torch.float16},
        {"quantization": "fp8"},
        {"hf_config": SimpleNamespace(to_dict=lambda: {"hidden_size": 1})},
        {"hf_image_processor_config": {"size": 336}},
        {"mm_processor_kwargs": {"num_crops": 4}},
        {"worker_cls": "mine.Worker"},
        {"worker_extension_cls": "mine.More"},
    ):
        assert fingerprint(**change) != base, change
    assert fingerprint(tensor_parallel_size=4) == base, "every rank has the whole output"


def test_the_dtype_of_items_is_the_models() -> None:
    assert item_dtype(vllm_config()) == "BF16"
    with pytest.raises(UnsupportedError, match="cannot be stored"):
        item_dtype(vllm_config(dtype=torch.complex64))


# --- items -----------------------------------------------------------------------------------


def feature(
    identifier: str = HASH, *, offset: int = 0, length: int = 100, modality: str = "image"
) -> MultiModalFeatureSpec:
    """Of a content of its own, by its name."""
    value = float(sum(identifier.encode()) % 251)
    return picture(identifier, value=value, offset=offset, length=length, modality=modality)


def request(name: str, *features: MultiModalFeatureSpec, lora: Any = None) -> Any:
    return SimpleNamespace(
        request_id=name,
        mm_features=list(features),
        lora_request=lora,
        kv_transfer_params=None,
    )


def key(item: MultiModalFeatureSpec, *, trusted: bool = False) -> bytes | None:
    found = wanted(item, MediaDigests(), trust_media_names=trusted)
    return None if found is None else found.key.block_hash


def test_an_items_key_is_of_its_content_or_of_a_trusted_name() -> None:
    one, same, other = picture("a"), picture("b"), picture("a", value=2.0)
    assert key(one) == key(same) != key(other)
    assert key(one, trusted=True) == key(other, trusted=True) != key(same, trusted=True)
    assert not {key(one)} & {key(one, trusted=True), None}
    assert key(without_tensors("a")) is None, "its tensors are not here"
    for trusted in (False, True):
        assert key(picture("a", modality="prompt_embeds"), trusted=trusted) is None
    assert len({key(picture("a", length=length)) for length in (99, 100)}) == 2
    assert key(picture("a", modality="video")) != key(one) == key(picture("a", offset=7))


@pytest.mark.parametrize("name", ["content:ab", 'a "quoted\\ one', "naïve\n🖼"])
def test_an_items_key_is_the_hash_of_canonical_json(name: str) -> None:
    fields = {"item": f"name:{name}", "modality": "vision_chunk", "rows": 100, "adapter": ""}
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    item = feature(name, modality="vision_chunk")
    assert key(item, trusted=True) == hashlib.sha256(text.encode()).digest()
