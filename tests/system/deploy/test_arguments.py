"""vLLM's own parser takes the arguments of every container in deploy/."""

from __future__ import annotations

import json
import warnings
from typing import Any

import pytest

from tests.system.deploy.manifests import KUBERNETES, Pod, render
from tests.system.deploy.test_charts import llm_d, production_stack
from tests.versions import serve_parser

pytestmark = [pytest.mark.infra, pytest.mark.xdist_group("deploy")]
SETTINGS = (KUBERNETES / "base" / "kv-transfer-config.json").read_text()
GROUP = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "engine-0.engine"}
"""What the controller of a LeaderWorkerSet sets, here for a follower."""


@pytest.fixture(scope="module")
def parser() -> Any:
    """Of `vllm serve`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what vLLM imports
        return serve_parser()


def pods(name: str) -> list[Pod]:
    charts = {"production-stack": production_stack, "llm-d-modelservice": llm_d}
    return [charts[name]()[0]] if name in charts else render(KUBERNETES / name).pods


def expanded(pod: Pod) -> list[str]:
    """The arguments as the kubelet passes them."""
    variables = GROUP | {"MODEL": "Qwen/Qwen3-8B", "KV_TRANSFER_CONFIG": SETTINGS}
    arguments: list[str] = pod.container["args"]
    for name, value in variables.items():
        arguments = [argument.replace(f"$({name})", value) for argument in arguments]
    assert not [argument for argument in arguments if "$(" in argument]
    return arguments


@pytest.mark.parametrize(
    "name",
    ["base", "overlays/tensor-parallel", "overlays/multi-host", "production-stack",
     "llm-d-modelservice"],
)  # fmt: skip
def test_vllm_takes_the_arguments(parser: Any, name: str) -> None:
    for pod in pods(name):
        told = parser.parse_args(expanded(pod))
        transfer = json.loads(SETTINGS)
        settings = transfer["kv_connector_extra_config"]
        assert told.kv_transfer_config.kv_connector == transfer["kv_connector"]
        assert told.kv_transfer_config.kv_connector_extra_config == settings
        assert told.shutdown_timeout == int(pod.argument("--shutdown-timeout"))


def test_leader_and_follower_are_one_engine(parser: Any) -> None:
    leader, follower = (parser.parse_args(expanded(p)) for p in pods("overlays/multi-host"))
    ranks = leader.tensor_parallel_size * leader.pipeline_parallel_size
    gpus = pods("overlays/multi-host")[0].container["resources"]["limits"]["nvidia.com/gpu"]
    assert ranks == leader.nnodes * int(gpus)
    assert not leader.headless
    assert follower.headless
    assert leader.nnodes == follower.nnodes == 2
