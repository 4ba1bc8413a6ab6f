"""What deploy/kubernetes gives vLLM is what this vLLM takes; the arguments: test_arguments.py."""

from __future__ import annotations

import vllm.envs
import yaml

from tests.project import ROOT


def test_the_variables_are_ones_vllm_reads() -> None:
    base = ROOT / "deploy" / "kubernetes" / "base"
    deployment = yaml.safe_load((base / "deployment.yaml").read_text())
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    named = {variable["name"] for variable in container["env"]}
    ours = {name for name in named if name.startswith("VLLM_")}
    assert ours
    assert ours <= set(vllm.envs.environment_variables)
