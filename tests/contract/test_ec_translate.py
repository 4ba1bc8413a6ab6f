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
from s3kv.connectors.ec_translate import check_supported, item_dtype, wanted
from s3kv.connectors.identity import encoder_fingerprint, fingerprint
from s3kv.connectors.kv_translate import geometry
from s3kv.connectors.media import MediaDigests
from s3kv.errors import ConfigError, UnsupportedError
from tests.contract.configurations import FULL, groups
from tests.contract.fingerprints import PAGE
from tests.contract.pictures import picture, without_tensors
from tests.unit.planning.ec_desk import WIDTH

HASH = "ab" * 32


def vllm_config(**changes: Any) -> Any:
    tree: dict[str, Any] = {
        "dtype": torch.bfloat16,
        "is_encoder_decoder": False,
        "get_inputs_embeds_size": lambda: WIDTH,
        "mm_processor_cache_gb": 4,
        "enable_prefix_caching": True,
        "data_parallel_size": 1,
        "is_moe": False,
        "prefill_context_parallel_size": 1,
    } | changes
    everything = SimpleNamespace(**tree, data_parallel_index=0)
    model = SimpleNamespace(**tree, multimodal_config=None if "text_only" in tree else everything)
    return SimpleNamespace(
        model_config=model,
        cache_config=everything,
        parallel_config=everything,
        lora_config=None,
        ec_transfer_config=SimpleNamespace(engine_id="engine"),
        max_concurrent_batches=2,
    )


@pytest.mark.parametrize(
    ("trusted", "changes", "error", "reason"),
    [
        (False, {"is_encoder_decoder": True}, UnsupportedError, "encoder-decoder"),
        (False, {"text_only": True}, UnsupportedError, "no encoder"),
        (False, {"prefill_context_parallel_size": 2}, UnsupportedError, "context_parallel"),
        (
            True,
            {"mm_processor_cache_gb": 0, "enable_prefix_caching": False},
            ConfigError,
            "numbers unnamed media",
        ),
    ],
)
def test_other_models_and_settings_are_refused(
    trusted: bool, changes: dict[str, Any], error: type[Exception], reason: str
) -> None:
    config = Config(bucket="bkt", trust_media_names=trusted)
    check_supported(config, vllm_config())
    with pytest.raises(error, match=reason):
        check_supported(config, vllm_config(**changes))


def test_the_fingerprint_is_that_of_the_computation_and_not_of_the_ranks(tiny_config: Any) -> None:
    """Every rank has the whole output. test_identity.py changes each field of the computation."""
    config, cache = Config(bucket="bkt"), groups(FULL)
    sizes = geometry(config, tiny_config, cache)
    whole = fingerprint(config, tiny_config, cache, sizes, PAGE)
    found = encoder_fingerprint(config, tiny_config)
    assert found.pop("content") == "encoder outputs"
    assert found.items() <= whole.items()
    assert whole.keys() - found.keys() == {
        *("speculative", "attention", "diffusion", "kv_cache", "ranks", "hash"),
        *("block_tokens", "chunk_tokens"),
    }


def test_the_dtype_of_items_is_the_models() -> None:
    assert item_dtype(vllm_config()) == "BF16"
    with pytest.raises(UnsupportedError, match="cannot be stored"):
        item_dtype(vllm_config(dtype=torch.complex64))


def feature(
    identifier: str = HASH, *, offset: int = 0, length: int = 100, modality: str = "image"
) -> MultiModalFeatureSpec:
    """Of a content of its own, by its name."""
    value = float(sum(identifier.encode()) % 251)
    return picture(identifier, value=value, offset=offset, length=length, modality=modality)


def request(name: str, *features: MultiModalFeatureSpec, **more: Any) -> Any:
    plain = dict.fromkeys(("kv_transfer_params", "lora_request", "cache_salt"))
    return SimpleNamespace(**plain | more, request_id=name, mm_features=list(features))


def key(item: MultiModalFeatureSpec, salt: Any = None, *, trusted: bool = False) -> bytes | None:
    one = request("r", item, cache_salt=salt)
    found = wanted(one, 0, MediaDigests(), b"", trust_media_names=trusted)
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


@pytest.mark.parametrize("salt", [{}, {"cache_salt": 'naïve "\\ \n🖼'}])
@pytest.mark.parametrize("name", ["content:ab", 'a "quoted\\ one', "naïve\n🖼"])
def test_an_items_key_is_the_hash_of_canonical_json(name: str, salt: dict[str, str]) -> None:
    fields = {"item": f"name:{name}", "modality": "vision_chunk", "rows": 100, "adapter": ""} | salt
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    item = feature(name, modality="vision_chunk")
    assert key(item, salt.get("cache_salt"), trusted=True) == hashlib.sha256(text.encode()).digest()
