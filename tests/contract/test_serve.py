"""What `s3kv serve` takes for granted of vLLM: options, and the table of multi-modal models."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from vllm.entrypoints.cli import main
from vllm.model_executor.models import registry
from vllm.platforms import current_platform
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

from s3kv.cli import serve
from s3kv.cli.app import cli
from s3kv.cli.configure import offloading_connector
from s3kv.config import Config
from s3kv.connectors.plugin import register
from s3kv.connectors.tier_setup import REPLACED, parse_settings
from tests.project import plant
from tests.versions import serve_parser


@pytest.fixture(scope="module")
def known() -> set[str]:
    return set(serve_parser()._option_string_actions)


def test_vllm_has_the_options_that_are_read_and_added(known: set[str]) -> None:
    added = {"--shutdown-timeout", "--ec-transfer-config"}
    read = serve.CONNECTING | set(serve.SHORT) | set(serve.SHORT.values())
    read |= {"--block-size", "--config", "--distributed-executor-backend"}
    read |= serve.BEYOND_TOKENS | {"--language-model-only", "--revision", "--scheduling-policy"}
    assert added | read <= known
    for short, name in serve.SHORT.items():
        parsed = [serve_parser().parse_args([o, "2", "--enable-lora"]) for o in (short, name)]
        assert parsed[0] == parsed[1]


def test_no_option_of_ours_hides_one_of_vllm(known: set[str]) -> None:
    ours = {option for p in cli.commands["serve"].params for option in (*p.opts, *p.secondary_opts)}
    assert ours & known == set()


def test_vllms_command_runs_as_a_module() -> None:
    assert 'if __name__ == "__main__":\n    main()' in Path(str(main.__file__)).read_text()


def test_the_platform_is_vllms() -> None:
    assert serve.runs_on_gpus() == (current_platform.is_cuda_alike() or current_platform.is_xpu())


def test_the_table_of_models_is_vllms() -> None:
    assert serve.multi_modal_architectures() == set(registry._MULTIMODAL_MODELS)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ('{"architectures": ["Blip2ForConditionalGeneration"]}', True),
        ('{"architectures": ["LlamaForCausalLM"]}', False),
        ('{"architectures": null}', False),
        ("{}", None),
        ("[]", None),
        ("", None),
    ],
)
def test_a_model_is_multi_modal_by_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: str, expected: bool | None
) -> None:
    """In a folder, or in the cache of the hub."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    def found(model: str, given: dict[str, str]) -> bool | None:
        return serve.is_multi_modal(serve.read_model_config(model, given), given)

    assert found("team/model", {}) is None
    assert found("s3://bucket/model", {}) is None
    repository = tmp_path / "models--team--model"
    plant(repository, {"refs/main": "abc", "snapshots/abc/config.json": config})
    assert found(str(repository / "snapshots" / "abc"), {}) is expected
    assert found("team/model", {}) is expected
    assert found("team/model", {"--language-model-only": ""}) is False


def test_the_tier_takes_the_settings_that_are_not_vllms() -> None:
    """And vLLM knows the tier by its type."""
    register()
    replaced = {"host_bytes": 2**30, "chunk_tokens": 512, "share_ranks": True}
    assert replaced.keys() == REPLACED.keys()
    config = Config(bucket="my-bucket", prefix="p", bucket_bytes=2**40, model_id="m", **replaced)
    extra = offloading_connector(config, workers=2)["kv_connector_extra_config"]
    (tier,) = extra["secondary_tiers"]
    assert SecondaryTierFactory.get_tier_class(tier).__name__ == "S3Tier"
    del tier["type"]
    assert dataclasses.replace(parse_settings(tier), **replaced) == config
