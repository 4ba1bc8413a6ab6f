"""The values for other projects' charts in deploy/helm: whether they fit s3kv's settings and image.

The charts are not part of this repository. deploy/README.md says with which of their versions the
values have been validated and rendered.
"""

from __future__ import annotations

import json
from typing import Any

import kubernetes_validate
import pytest
import yaml

from s3kv.config import Config
from tests.project import ROOT
from tests.system.deploy.manifests import KUBERNETES, VERSIONS, Pod

HELM = ROOT / "deploy" / "helm"
CHARTS = ("production-stack", "llm-d-modelservice")
DEFAULT_GRACE_S = 30
"""Kubernetes' own, where nothing is set."""
SETTINGS = KUBERNETES / "base" / "kv-transfer-config.json"


def values(chart: str) -> Any:
    return yaml.safe_load((HELM / f"{chart}.yaml").read_text())


def production_stack() -> tuple[Pod, int]:
    """The pod that the chart makes, as far as the values say it, and the number of replicas."""
    engine = values("production-stack")["servingEngineSpec"]
    (model,) = engine["modelSpec"]
    container = {
        "image": f"{model['repository']}:{model['tag']}",
        "args": model["vllmConfig"]["extraArgs"],
        "env": model["env"],
        "securityContext": engine["containerSecurityContext"],
        "resources": {
            "requests": {"memory": model["requestMemory"]},
            "limits": {"memory": model["limitMemory"], "nvidia.com/gpu": model["requestGPU"]},
        },
        "startupProbe": engine["startupProbe"],
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}, *model["extraVolumeMounts"]],
    }
    shm = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": model["shmSize"]}}
    spec = {
        "serviceAccountName": model["serviceAccountName"],
        "securityContext": engine["securityContext"],
        "terminationGracePeriodSeconds": DEFAULT_GRACE_S,
        "tolerations": engine["tolerations"],
        "containers": [container],
        "volumes": [shm, *model["extraVolumes"]],
    }
    assert "tensorParallelSize" in model["vllmConfig"]  # without it there is no /dev/shm
    assert model["pdb"] == {"enabled": True, "maxUnavailable": 1}
    return Pod(spec, settings()), model["replicaCount"]


def llm_d() -> tuple[Pod, int]:
    told = values("llm-d-modelservice")
    decode = told["decode"]
    (container,) = decode["containers"]
    container |= container.pop("extraConfig")
    container["resources"]["limits"]["nvidia.com/gpu"] = decode["parallelism"]["tensor"]
    spec = decode | decode["extraConfig"] | {"serviceAccountName": told["serviceAccountOverride"]}
    labels = told["modelArtifacts"]["labels"].items()
    (budget,) = told["extraObjects"]
    assert budget["spec"]["maxUnavailable"] == 1
    assert budget["spec"]["selector"]["matchLabels"].items() <= labels
    kubernetes_validate.validate(budget, VERSIONS[-1], strict=True)
    for spread in spec["topologySpreadConstraints"]:
        assert spread["labelSelector"]["matchLabels"].items() <= labels
    return Pod(spec, settings()), decode["replicas"]


def settings() -> Config:
    return Config.parse(json.loads(SETTINGS.read_text())["kv_connector_extra_config"])


@pytest.fixture(params=[production_stack, llm_d], ids=CHARTS)
def told(request: pytest.FixtureRequest) -> tuple[Pod, int]:
    return request.param()


@pytest.fixture
def pod(told: tuple[Pod, int]) -> Pod:
    return told[0]


def test_there_is_a_test_for_each_chart() -> None:
    assert {path.stem for path in HELM.glob("*.yaml")} == set(CHARTS)


def test_the_settings_are_those_of_the_manifests(pod: Pod) -> None:
    assert pod.argument("--kv-transfer-config") == "$(KV_TRANSFER_CONFIG)"
    reference = pod.variable("KV_TRANSFER_CONFIG")["valueFrom"]["configMapKeyRef"]
    assert reference == {"name": "s3kv", "key": SETTINGS.name}
    assert pod.volume("/etc/s3kv")["configMap"]["name"] == "s3kv"
    guide = (ROOT / "deploy" / "README.md").read_text()
    assert "create configmap s3kv" in guide
    assert f"--from-file={SETTINGS.relative_to(ROOT)}" in guide


def test_a_shutdown_leaves_time_for_uploads(pod: Pod) -> None:
    assert pod.spec["terminationGracePeriodSeconds"] >= pod.least_grace_s


def test_the_memory_limit_holds_what_is_taken(pod: Pod) -> None:
    pod.check_memory()


def test_a_start_has_time(pod: Pod) -> None:
    start = pod.container["startupProbe"]
    assert start["httpGet"]["path"] == "/health"
    assert start["periodSeconds"] * start["failureThreshold"] > 600


def test_image_user_and_account_are_those_of_the_manifests(pod: Pod) -> None:
    pod.check_image_and_user()
    account = yaml.safe_load((KUBERNETES / "base" / "serviceaccount.yaml").read_text())
    assert pod.spec["serviceAccountName"] == account["metadata"]["name"]


def test_a_fleet_survives_a_drained_node_of_gpus(told: tuple[Pod, int]) -> None:
    pod, replicas = told
    assert replicas >= 2
    pod.check_tolerations()
