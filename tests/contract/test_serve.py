"""What `s3kv serve` takes for granted of vLLM: options, and the table of multi-modal models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from vllm.model_executor.models import registry
from vllm.platforms import current_platform

from s3kv.cli import serve
from s3kv.cli.app import cli
from tests.versions import serve_parser


@pytest.fixture(scope="module")
def known() -> set[str]:
    return set(serve_parser()._option_string_actions)


def test_vllm_has_the_options_that_are_read_and_added(known: set[str]) -> None:
    added = {"--shutdown-timeout", "--ec-transfer-config"}
    read = serve.CONNECTING | set(serve.SHORT) | set(serve.SHORT.values())
    read |= {"--block-size", "--config", "--distributed-executor-backend"}
    read |= {"--language-model-only", "--revision"}
    assert added | read <= known
    for short, name in serve.SHORT.items():
        parsed = [serve_parser().parse_args([o, "2", "--enable-lora"]) for o in (short, name)]
        assert parsed[0] == parsed[1]


def test_no_option_of_ours_hides_one_of_vllm(known: set[str]) -> None:
    ours = {option for p in cli.commands["serve"].params for option in (*p.opts, *p.secondary_opts)}
    assert ours & known == set()


def test_the_platform_is_vllms() -> None:
    devices = current_platform.is_cuda_alike() or current_platform.is_xpu()
    assert serve.runs_on_gpus() == devices


def test_the_table_of_models_is_vllms() -> None:
    assert serve.multi_modal_architectures() == set(registry._MULTIMODAL_MODELS)


@pytest.mark.parametrize(
    ("config", "words", "expected"),
    [
        ({"architectures": ["Blip2ForConditionalGeneration"]}, [], True),
        ({"architectures": ["Blip2ForConditionalGeneration"]}, ["--language-model-only"], False),
        ({"architectures": ["Blip2ForConditionalGeneration"]}, ["-n", "2"], False),
        (
            {"architectures": ["Blip2ForConditionalGeneration"]},
            ["--distributed-executor-backend", "ray"],
            False,
        ),
        ({"architectures": ["LlamaForCausalLM"]}, [], False),
        (
            {"architectures": ["WhisperForConditionalGeneration"], "is_encoder_decoder": True},
            [],
            False,
        ),
        ({}, [], False),
        (None, [], None),
    ],
)
def test_a_model_with_an_encoder(
    tmp_path: Path, config: dict[str, Any] | None, words: list[str], expected: bool | None
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    assert serve.has_encoder(str(tmp_path), serve.given_options(words)) is expected


def test_a_model_of_the_hub_is_known_once_it_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert serve.has_encoder("team/model", {}) is None
    assert serve.has_encoder("s3://bucket/model", {}) is None
    repository = tmp_path / "models--team--model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    file = repository / "snapshots" / "abc" / "config.json"
    file.parent.mkdir(parents=True)
    file.write_text('{"architectures": ["Blip2ForConditionalGeneration"]}')
    assert serve.has_encoder("team/model", {})
