"""`s3kv config`: what it prints is what vLLM, a shell and Kubernetes read back."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from s3kv.cli.app import cli
from s3kv.config import Config

LLAMA_8B = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}


def run(*arguments: str) -> Result:
    command = ["config", "--bucket", "my-bucket", *arguments]
    return CliRunner().invoke(cli, command, catch_exceptions=False)


def model(directory: Path, **changes: Any) -> str:
    file = directory / "config.json"
    file.write_text(json.dumps(LLAMA_8B | changes))
    return str(file)


def settings_of(options: dict[str, dict[str, Any]]) -> tuple[Config, Config]:
    return (
        Config.parse(options["--kv-transfer-config"]["kv_connector_extra_config"]),
        Config.parse(options["--ec-transfer-config"]["ec_connector_extra_config"]),
    )


AWKWARD = ("--prefix", "it's/$(HOME)", "--set", "host_bytes=1536MiB", "--set", "verify_tls=false")
MEANT = Config(bucket="my-bucket", prefix="it's/$(HOME)", host_bytes=1536 * 2**20, verify_tls=False)


def test_a_shell_reads_it_back() -> None:
    result = run(*AWKWARD)
    words = shlex.split(result.stdout, comments=True)
    options = {name: json.loads(value) for name, value in zip(words[::2], words[1::2], strict=True)}
    assert settings_of(options) == (MEANT, MEANT)
    assert options["--kv-transfer-config"]["kv_role"] == "kv_both"


def test_kubernetes_reads_it_back() -> None:
    result = run(*AWKWARD, "--format", "kubernetes", "--role", "consumer")
    words = yaml.safe_load(result.stdout)["args"]
    values = [json.loads(value.replace("$$(", "$(")) for value in words[1::2]]
    options = dict(zip(words[::2], values, strict=True))
    assert settings_of(options) == (MEANT, MEANT)
    assert options["--ec-transfer-config"]["ec_role"] == "ec_consumer"
    assert not any("$(" in word.replace("$$(", "") for word in words)


def test_defaults_are_left_out() -> None:
    document = json.loads(run("--json", "--set", "pool_size=64").stdout)
    assert document["kv_transfer_config"]["kv_connector_extra_config"] == {"bucket": "my-bucket"}
    assert document["host_memory"] is None


def test_a_wrong_setting_is_refused() -> None:
    result = run("--set", "pool_size=0")
    assert result.exit_code == 2
    assert "pool_size is 0" in result.stderr


@pytest.mark.parametrize(
    ("changes", "options", "bytes_per_token"),
    [
        # 2 (keys, values) × 32 layers × 8 heads × 128 × 2 bytes
        ({}, [], 131_072),
        ({}, ["--tensor-parallel-size", "4"], 32_768),
        ({}, ["--tensor-parallel-size", "16"], 16_384),  # a head is not divided
        ({}, ["--pipeline-parallel-size", "3"], 45_056),  # 11 layers
        ({}, ["--kv-cache-dtype", "fp8"], 65_536),
        ({"num_key_value_heads": None}, [], 524_288),
        ({"head_dim": 64}, [], 65_536),
        # DeepSeek-V3: 61 layers × (512 + 64) × 2 bytes, whole on every worker
        (
            {"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64},
            ["--tensor-parallel-size", "8"],
            70_272,
        ),
    ],
)
def test_bytes_per_token(
    tmp_path: Path, changes: dict[str, Any], options: list[str], bytes_per_token: int
) -> None:
    result = run("--json", "--model-config", model(tmp_path, **changes), *options)
    assert json.loads(result.stdout)["host_memory"]["bytes_per_token"] == bytes_per_token


def test_what_host_memory_holds(tmp_path: Path) -> None:
    file = model(tmp_path)
    found = json.loads(run("--json", "--model-config", file).stdout)["host_memory"]
    # A chunk is 256 tokens of 128 KiB, 32 MiB, and its header: 4 GiB hold one less than 128.
    assert found["slot_bytes"] == 32 * 2**20 + 4096
    assert (found["chunk_tokens"], found["chunks"], found["tokens"]) == (256, 127, 32_512)
    text = run("--model-config", file, "--format", "kubernetes").stdout
    assert "127 chunks: 32,512 tokens" in text
    assert yaml.safe_load(text)["args"][0] == "--kv-transfer-config"


def test_a_model_within_a_model(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"text_config": LLAMA_8B, "vision_config": {"hidden_size": 1}}))
    found = json.loads(run("--json", "--model-config", str(file)).stdout)["host_memory"]
    assert found["bytes_per_token"] == 131_072


@pytest.mark.parametrize(
    ("changes", "options", "said"),
    [
        ({"num_hidden_layers": None}, [], "has no num_hidden_layers"),
        ({"torch_dtype": "int4"}, [], "give --kv-cache-dtype"),
        ({"layer_types": ["sliding_attention"] * 2}, [], "sliding_attention"),
        ({"layer_types": ["full_attention", "linear_attention"]}, [], "linear_attention"),
        ({}, ["--set", "host_bytes=1MiB"], "at least one chunk"),
        ({}, ["--set", "chunk_tokens=100"], "a multiple of the KV block size"),
    ],
)
def test_models_that_do_not_fit(
    tmp_path: Path, changes: dict[str, Any], options: list[str], said: str
) -> None:
    result = run("--model-config", model(tmp_path, **changes), *options)
    assert result.exit_code == 2
    assert said in result.stderr


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": 4096, "layer_types": ["sliding_attention", "full_attention"]},
        {"layer_types": ["chunked_attention", "full_attention"]},
        {"sliding_window": 4096},
    ],
)
def test_layers_with_a_window_need_an_option_more(tmp_path: Path, changes: dict[str, Any]) -> None:
    file = model(tmp_path, **changes)
    option = "--disable-hybrid-kv-cache-manager"
    text = run("--model-config", file).stdout
    assert option in text.splitlines()
    assert "# It has layers with a window" in text
    rendered = yaml.safe_load(run("--model-config", file, "--format", "kubernetes").stdout)
    assert rendered["args"][-1] == option
    found = json.loads(run("--json", "--model-config", file).stdout)
    assert found["disable_hybrid_kv_cache_manager"] is True


def test_windows_that_are_not_used(tmp_path: Path) -> None:
    file = model(tmp_path, sliding_window=4096, use_sliding_window=False)
    result = run("--model-config", file)
    assert result.exit_code == 0
    assert "hybrid" not in result.stdout
