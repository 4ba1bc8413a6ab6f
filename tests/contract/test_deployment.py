"""What deploy/kubernetes gives vLLM is what this vLLM takes."""

from __future__ import annotations

import json
from typing import Any

import pytest
import vllm.envs
import yaml
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from s3kv.cli.invocation import read_settings
from tests.project import ROOT

BASE = ROOT / "deploy" / "kubernetes" / "base"
SETTINGS = BASE / "kv-transfer-config.json"


@pytest.fixture(scope="module")
def container() -> dict[str, Any]:
    deployment = yaml.safe_load((BASE / "deployment.yaml").read_text())
    (only,) = deployment["spec"]["template"]["spec"]["containers"]
    return dict(only)


def test_vllm_parses_the_arguments(container: dict[str, Any]) -> None:
    values = {"MODEL": "some/model", "KV_TRANSFER_CONFIG": SETTINGS.read_text()}
    arguments = list(container["args"])
    for name, value in values.items():
        arguments = [argument.replace(f"$({name})", value) for argument in arguments]
    assert not [argument for argument in arguments if "$(" in argument]
    model, *options = arguments
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    parsed = parser.parse_args([f"--model={model}", *options])
    assert parsed.kv_transfer_config.kv_connector == "S3KVConnector"
    held = json.loads(SETTINGS.read_text())["kv_connector_extra_config"]
    assert parsed.kv_transfer_config.kv_connector_extra_config == held
    assert parsed.shutdown_timeout > 0


def test_the_variables_are_ones_vllm_reads(container: dict[str, Any]) -> None:
    named = {variable["name"] for variable in container["env"]}
    ours = {name for name in named if name.startswith("VLLM_")}
    assert ours
    assert ours <= set(vllm.envs.environment_variables)


def test_the_command_line_takes_the_file_as_it_is_mounted() -> None:
    assert read_settings(SETTINGS, {}, [])["bucket"] == "my-kv-cache"
