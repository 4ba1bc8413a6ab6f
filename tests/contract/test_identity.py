"""What changes the bytes of a chunk, or what they mean, changes the namespace."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.platforms import current_platform

from lab import models
from s3kv.config import Config
from s3kv.connectors import identity
from s3kv.connectors.identity import fingerprint
from s3kv.connectors.kv_translate import geometry
from s3kv.objects.keys import canonical_json, fingerprint_digest
from tests.contract.configurations import FULL, configured, groups
from tests.contract.fingerprints import PAGE, Engine, drafts, layer, leaves, sees


def weights_of_an_update(e: Engine, folder: Path | None = None) -> None:
    file = (folder or e.folder) / "model.safetensors"
    data = bytearray(file.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 8192] = bytes(8192)
    file.write_bytes(data)


def change(make: Callable[..., Any]) -> Callable[..., Callable[[Engine], Any]]:
    """`make`, which gets the engine and how to change it, as what makes a change of the latter."""
    return lambda *how, **values: lambda e: make(e, *how, **values)


@change
def write(e: Engine, name: str, text: str) -> None:
    """A file of the model's folder, new or other than before."""
    (e.folder / name).write_text(text)


@change
def on(e: Engine, holder: str, **values: Any) -> None:
    e.set(getattr(e.vllm, holder), **values)


model, cache, parallel = (partial(on, f"{name}_config") for name in ("model", "cache", "parallel"))


def draft_of(e: Engine) -> Any:
    return e.vllm.speculative_config.draft_model_config


def draft_folder(e: Engine) -> Path:
    return Path(draft_of(e).model)


@change
def scales(e: Engine, text: str) -> None:
    path = e.folder.parent / "scales"
    path.write_text(text)
    sees(mm_encoder_fp8_scale_path=str(path))(e)


def libraries(e: Engine) -> None:
    versions = {"transformers": "5.99"}
    e.patch.setattr("importlib.metadata.version", lambda name: versions.get(name, "1"))


@change
def hf(e: Engine, commit: str | None = None, **values: Any) -> None:
    """Another model configuration, as `hf_overrides` or another config.json make it."""
    tree = e.model.hf_config.to_dict() | values
    e.set(e.model, hf_config=SimpleNamespace(to_dict=lambda: tree, _commit_hash=commit))


@change
def environment(e: Engine, name: str, value: str) -> None:
    e.patch.setenv(name, value)


@change
def humming(e: Engine, text: str, name: str = "humming") -> None:
    """A number format that a variable says by the name of a file."""
    path = e.folder.parent / name
    path.write_text(text)
    e.patch.setenv(HUMMING, str(path))


HUMMING = "VLLM_HUMMING_INPUT_QUANT_CONFIG"
LONGROPE = hf(rope_parameters={"rope_type": "longrope"})
DYNAMIC_ROPE = hf(rope_parameters={"rope_type": "dynamic", "factor": 4.0})
LLAMA_4 = hf(model_type="llama4", text_config={"model_type": "llama4_text"})
UNSCALED = {"attn_temperature_tuning": False}
DUMMY = on("load_config", load_format="dummy")
CHANGES: list[tuple[str, str, Callable[[Engine], Any]]] = [
    ("format", "format version", lambda e: e.patch.setattr(identity, "FORMAT_VERSION", "other")),
    ("vllm", "engine", lambda e: e.patch.setattr("vllm.__version__", "0.40.0")),
    ("model.name", "name by setting", lambda e: e.settings(model_id="other")),
    ("model.name", "path", lambda e: e.settings(model_id=None)),
    ("model.commit", "commit of a branch", hf("c0ffee")),
    ("model.code_revision", "remote code", model(code_revision="abc")),
    ("model.weights", "weights in place", weights_of_an_update),
    ("model.weights", "no weights at hand", model(model="org/model")),
    ("model.dummy_seed", "random weights", DUMMY),
    ("model.config", "rope", hf(rope_theta=20_000.0)),
    ("model.config", "rope scaling", hf(rope_parameters={"rope_type": "yarn", "factor": 4.0})),
    ("model.config", "layers", hf(num_hidden_layers=5)),
    ("model.config", "checkpoint quantization", hf(quantization_config={"bits": 4})),
    ("model.implementation", "implementation", model(model_impl="transformers")),
    ("model.remote_code", "whose code", model(trust_remote_code=True)),
    ("model.files", "code of the model's own", write("modeling_own.py", "WINDOW = 1")),
    ("model.files", "how images are prepared", write("preprocessor_config.json", "{}")),
    ("model.files", "which files are loaded", write("model.safetensors.index.json", "{}")),
    ("model.files", "scales beside the weights", write("hf_quant_config.json", "{}")),
    ("model.load", "which files are weights", on("load_config", load_format="pt")),
    ("model.load", "which are not", on("load_config", ignore_patterns=["*.bin"])),
    (
        "model.load",
        "weights elsewhere",
        on("load_config", model_loader_extra_config={"tensorizer_uri": "s3://b/model.tensors"}),
    ),
    ("model.runner", "embeds", model(runner_type="pooling")),
    ("model.convert", "embeds by conversion", model(convert_type="embed")),
    ("additional", "a platform's options", lambda e: e.set(e.vllm, additional_config={"a": 1})),
    ("processor.libraries", "sees", sees()),
    ("processor.libraries", "run by transformers", model(using_transformers_backend=lambda: True)),
    (
        "diffusion.canvas_length",
        "diffusion",
        lambda e: e.set(e.vllm, diffusion_config=SimpleNamespace(canvas_length=32)),
    ),
    ("worker.worker_cls", "worker", parallel(worker_cls="mine.Worker")),
    ("worker.worker_extension_cls", "its extension", parallel(worker_extension_cls="mine.More")),
    *[(f"attention.{n}", n, on("attention_config", **{n: "other"})) for n in identity._ATTENTION],
    *[(f"kernels.{n}", n, on("kernel_config", **{n: "other"})) for n in identity._KERNELS],
    *[(f"environment.{name}", name, environment(name, "2")) for name in identity.ENVIRONMENT],
    ("model.class_overrides", "class", model(model_class_overrides={"A": "b:C"})),
    ("model.dtype", "dtype", model(dtype="torch.float16")),
    ("model.quantization", "quantization", model(quantization="fp8")),
    ("model.quantization_config", "online", model(quantization_config={"scheme": "fp8"})),
    ("model.disable_sliding_window", "window", model(disable_sliding_window=True)),
    (
        "speculative.method",
        "draft",
        lambda e: e.set(e.vllm, speculative_config=SimpleNamespace(method="eagle", model="d")),
    ),
    (
        "multimodal.mm_processor_kwargs",
        "image sizes",
        model(multimodal_config=SimpleNamespace(mm_processor_kwargs={"max_pixels": 1})),
    ),
    (
        "lora.lora_dtype",
        "adapters",
        lambda e: e.set(e.vllm, lora_config=SimpleNamespace(lora_dtype="float32")),
    ),
    ("kv_cache.dtype", "kv dtype", cache(cache_dtype="fp8_e4m3")),
    (
        "kv_cache.dtype",
        "what an fp8 means",  # on AMD's gfx94x
        lambda e: e.patch.setattr(type(current_platform), "is_fp8_fnuz", lambda *args: True),
    ),
    ("kv_cache.unquantized_layers", "kv dtype", cache(kv_cache_dtype_skip_layers=["1"])),
    ("kv_cache.layout", "layout", lambda e: e.set(e.cache, kv_cache_layout="LHBNC")),
    ("kv_cache.page", "page", lambda e: setattr(e, "page", PAGE | {"chunk_blocks": 4})),
    (
        "kv_cache.attention",
        "backend",
        lambda e: e.set(
            e.vllm.compilation_config, static_forward_context={"layer.0": layer("FLASHINFER")}
        ),
    ),
    ("kv_cache.cpu_isa", "CPU", lambda e: e.patch.setattr("platform.machine", lambda: "arm")),
    ("ranks.tensor", "tensor parallelism", parallel(tensor_parallel_size=2)),
    ("ranks.pipeline", "pipeline parallelism", parallel(pipeline_parallel_size=2)),
    ("chunk_tokens", "chunk", lambda e: e.settings(chunk_tokens=512)),
    (
        "block_tokens",
        "block",
        lambda e: setattr(e, "cache", groups(dataclasses.replace(FULL, block_size=64))),
    ),
    ("hash.algorithm", "hash", cache(prefix_caching_hash_algo="sha256_cbor")),
    ("hash.tokens", "hash block", lambda e: e.set(e.cache, hash_block_size=64)),
    ("hash.seed", "seed", environment("PYTHONHASHSEED", "1")),
    ("hash.python", "pickle", lambda e: e.patch.setattr(sys, "version_info", (3, 99, 0))),
]
TOGETHER: list[tuple[str, Callable[[Engine], Any], Callable[[Engine], Any]]] = [
    ("speculative.draft", drafts, lambda e: weights_of_an_update(e, draft_folder(e))),
    ("speculative.draft", drafts, lambda e: (draft_folder(e) / "modeling_own.py").write_text("")),
    ("speculative.draft", drafts, lambda e: e.set(draft_of(e), model="org/draft")),
    ("processor.image", sees(), model(hf_image_processor_config={"image_mean": [0.5]})),
    ("processor.libraries", sees(), libraries),
    ("model.files", sees(), write("tokenizer_config.json", '{"processor_class": "Other"}')),
    ("model.files", write("modeling_own.py", "WINDOW = 1"), write("modeling_own.py", "WINDOW = 2")),
    ("multimodal.encoder_scales", scales("1"), scales("2")),
    ("multimodal.language_model_only", sees(), sees(language_model_only=True)),
    ("model.max_model_len", LONGROPE, model(max_model_len=100_000)),
    ("model.max_model_len", DYNAMIC_ROPE, model(max_model_len=100_000)),
    ("model.max_model_len", LLAMA_4, model(max_model_len=100_000)),
    ("model.max_model_len", LLAMA_4, model(override_generation_config=UNSCALED)),
    ("model.max_model_len", LLAMA_4, write("generation_config.json", json.dumps(UNSCALED))),
    (f"environment.{HUMMING}", humming('{"dtype": "int8"}'), humming('{"dtype": "int4"}')),
    ("model.dummy_seed", DUMMY, model(seed=7)),
    (
        "ranks.layers",
        parallel(pipeline_parallel_size=2),
        environment("VLLM_PP_LAYER_PARTITION", "1,3"),
    ),
]
"""Fields that matter only where something else has been set first."""


ALL = [*((field, None, change) for field, _, change in CHANGES), *TOGETHER]


@pytest.mark.parametrize(
    ("field", "first", "second"), ALL, ids=[f"{number}-{c[0]}" for number, c in enumerate(ALL)]
)
def test_each_change_is_another_namespace(
    engine: Engine, field: str, first: Any, second: Callable[[Engine], Any]
) -> None:
    if first is not None:
        first(engine)
        assert field in leaves(engine.fingerprint())
    before = engine.fingerprint()
    second(engine)
    after = engine.fingerprint()
    assert fingerprint_digest(after) != fingerprint_digest(before)
    assert leaves(after).get(field) != leaves(before).get(field)


def test_no_field_is_left_out_of_the_list_above(engine: Engine) -> None:
    """Whatever is added to a fingerprint has to be added there."""
    tried = {field for field, _, _ in CHANGES} | {field for field, _, _ in TOGETHER}
    whole_sections = {"speculative", "multimodal", "lora", "processor", "diffusion"}
    assert set(leaves(engine.fingerprint())) - whole_sections <= tried
    assert whole_sections <= {field.partition(".")[0] for field in tried}


def test_the_same_engine_elsewhere_is_the_same(engine: Engine, tmp_path: Path) -> None:
    before = engine.fingerprint()
    shutil.copytree(tmp_path / "model", tmp_path / "elsewhere")
    engine.set(engine.model, model=str(tmp_path / "elsewhere"), max_model_len=1024, seed=9)
    # Only Llama 4 reads this for more than how tokens are chosen.
    engine.set(engine.model, override_generation_config=UNSCALED)
    write("generation_config.json", json.dumps(UNSCALED))(engine)
    engine.set(engine.vllm.cache_config, gpu_memory_utilization=0.5)
    os.utime(tmp_path / "elsewhere" / "model.safetensors", (1, 1))
    assert engine.fingerprint() == before


def test_no_other_thing_that_is_dynamic_depends_on_the_length(engine: Engine) -> None:
    """Most fp8 checkpoints scale their activations dynamically."""
    hf(quantization_config={"activation_scheme": "dynamic"})(engine)
    before = engine.fingerprint()
    engine.set(engine.model, max_model_len=1024)
    assert engine.fingerprint() == before


def test_a_second_start_is_the_same(directory: Path, tiny_config: Any) -> None:
    path = models.build(directory, models.TINY)
    config, cached = Config(bucket="kv-cache"), groups(FULL)
    first, second = (
        fingerprint(config, c, cached, geometry(config, c, cached), PAGE)
        for c in (tiny_config, configured(path))
    )
    assert canonical_json(first) == canonical_json(second)


def test_the_mark_of_another_fp8_is_on_no_other_platform(engine: Engine) -> None:
    assert leaves(engine.fingerprint())["kv_cache.dtype"] == engine.vllm.cache_config.cache_dtype


def test_a_file_that_a_variable_names_counts_by_its_content(engine: Engine, tmp_path: Path) -> None:
    humming("{}")(engine)
    before = engine.fingerprint()
    humming("{}", "elsewhere")(engine)
    assert engine.fingerprint() == before
    engine.patch.setenv(HUMMING, '{"dtype": "int8"}')
    engine.patch.setenv("VLLM_USE_DEEP_GEMM", "1")
    # vLLM reads no file for this one.
    (tmp_path / "1").write_text("written by mistake")
    engine.patch.chdir(tmp_path)
    assert engine.fingerprint()["environment"] == {
        HUMMING: '{"dtype": "int8"}',
        "VLLM_USE_DEEP_GEMM": "1",
    }


def test_a_generation_config_that_cannot_be_read_is_none_that_says_nothing(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> dict[str, Any]:
        raise ValueError("no such repository")

    LLAMA_4(engine)
    before = engine.fingerprint()
    engine.set(engine.model, try_get_generation_config=refuse)
    assert engine.fingerprint() != before
    assert "no such repository" in caplog.text


TWO_RANKS = {"world_size": 2, "tp_size": 2}


@pytest.mark.parametrize(
    ("changes", "row_bytes", "is_same"),
    [
        ({}, 4096, True),
        ({}, 8192, False),
        ({"tokens": 32}, 4096, False),
        ({"layers": ("0", "2")}, 4096, False),
        ({"blocks": 4}, 4096, False),
        ({"hashed": 32}, 4096, False),
        ({"replicated_layout": True}, 4096, False),
        ({"canonical_layout": True}, 4096, False),
        ({"kv_cache_layout": "HND"}, 4096, False),
        ({"parallel": TWO_RANKS}, 4096, False),
        ({"is_agnostic": True}, 4096, False),
    ],
)
def test_what_changes_the_namespace_of_a_tier(
    changes: dict[str, Any], row_bytes: int, is_same: bool, engine: Engine
) -> None:
    before = engine.offload_fingerprint()
    after = engine.offload_fingerprint(row_bytes, **changes)
    assert (canonical_json(before) == canonical_json(after)) is is_same


def test_rows_of_any_parallel_size_are_one_namespace_of_a_tier(engine: Engine) -> None:
    one, two = (
        engine.offload_fingerprint(is_agnostic=True, parallel=parallel)
        for parallel in ({}, TWO_RANKS)
    )
    assert one == two


@pytest.mark.parametrize(
    "change", [weights_of_an_update, on("attention_config", backend="FLASH_ATTN")]
)
def test_an_engine_that_computes_otherwise_is_another_namespace_of_a_tier(
    change: Callable[[Engine], None], engine: Engine
) -> None:
    before = engine.offload_fingerprint()
    change(engine)
    assert engine.offload_fingerprint() != before


def draft(tokens: int) -> Callable[[Engine], None]:
    return lambda e: e.set(
        e.vllm, speculative_config=SimpleNamespace(num_speculative_tokens=tokens)
    )


@pytest.mark.parametrize(
    "change",
    [
        on("cache_config", mamba_cache_dtype="float16"),
        on("cache_config", mamba_ssm_cache_dtype="bfloat16"),
        on("cache_config", mamba_cache_mode="all"),
        on("mamba_config", enable_stochastic_rounding=True),
        lambda e: e.patch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", "DS"),
        draft(3),
    ],
)
@pytest.mark.parametrize("has_states", [True, False])
def test_other_states_are_another_namespace_of_a_tier(
    has_states: bool, change: Callable[[Engine], None], engine: Engine
) -> None:
    """Padding hides a difference of the numbers. Models without states share all the same."""
    info = dataclasses.replace(engine.model._model_info, has_inner_state=has_states)
    engine.set(engine.model, _model_info=info)
    draft(1)(engine)
    before = engine.offload_fingerprint()
    change(engine)
    assert (engine.offload_fingerprint() != before) is has_states


def test_another_order_of_tokens_on_ranks_is_another_namespace_of_a_tier(engine: Engine) -> None:
    before = engine.offload_fingerprint()
    on("parallel_config", cp_kv_cache_interleave_size=16)(engine)
    assert engine.offload_fingerprint() != before
