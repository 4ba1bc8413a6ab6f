"""The manifests in deploy/: what Kubernetes' schemas say of them, and whether they fit together.

kustomize (a part of kubectl) renders them without a cluster.
"""

from __future__ import annotations

import json
import re

import hcl2
import kubernetes_validate
import pytest

from tests.project import ROOT
from tests.system.deploy.manifests import KUBERNETES, Rendered, render

FOLDERS = ("base", "overlays/eks-irsa", "overlays/tensor-parallel")
VERSIONS = ("1.32", "1.33", "1.34", "1.35", "1.36", "1.37")
ENGINE_BYTES = 24 * 2**30
"""What deploy/README.md says an engine needs beside s3kv's memory and /dev/shm."""

pytestmark = [pytest.mark.infra, pytest.mark.xdist_group("deploy")]


@pytest.fixture(scope="module", params=FOLDERS)
def rendered(request: pytest.FixtureRequest) -> Rendered:
    return render(KUBERNETES / request.param)


def nbytes(quantity: str) -> int:
    number, unit = re.fullmatch(r"(\d+)([KMGT]i)", quantity).groups()  # type: ignore[union-attr]
    return int(number) * 2 ** {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40}[unit]


@pytest.mark.parametrize("version", VERSIONS)
def test_the_schemas_of_kubernetes_accept_it(rendered: Rendered, version: str) -> None:
    builtin = [o for o in rendered.objects if o["kind"] != "PodMonitor"]
    assert len(builtin) == 4
    for o in builtin:
        kubernetes_validate.validate(o, version, strict=True)


def test_the_schemas_would_notice_a_misspelt_field(rendered: Rendered) -> None:
    broken = json.loads(json.dumps(rendered.one("Deployment")))
    broken["spec"]["template"]["spec"]["terminationGracePeriod"] = 90
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, VERSIONS[-1], strict=True)


def test_the_settings_are_what_the_engine_and_the_command_line_get(rendered: Rendered) -> None:
    assert rendered.settings.bucket == "my-kv-cache"
    assert rendered.argument("--kv-transfer-config") == "$(KV_TRANSFER_CONFIG)"
    reference = rendered.variable("KV_TRANSFER_CONFIG")["valueFrom"]["configMapKeyRef"]
    assert reference["name"] == rendered.one("ConfigMap")["metadata"]["name"]
    assert reference["key"] in rendered.one("ConfigMap")["data"]
    assert rendered.volume("/etc/s3kv")["configMap"]["name"] == reference["name"]


def test_the_memory_limit_holds_what_is_taken(rendered: Rendered) -> None:
    resources = rendered.container["resources"]
    gpus = int(resources["limits"]["nvidia.com/gpu"])
    assert int(rendered.argument("--tensor-parallel-size")) == gpus
    shm = rendered.volume("/dev/shm")["emptyDir"]
    assert shm["medium"] == "Memory"
    taken = gpus * rendered.settings.host_bytes + nbytes(shm["sizeLimit"]) + ENGINE_BYTES
    assert nbytes(resources["limits"]["memory"]) >= taken
    assert resources["requests"]["memory"] == resources["limits"]["memory"]


def test_a_shutdown_leaves_time_for_uploads(rendered: Rendered) -> None:
    drain_s = rendered.settings.drain_timeout_s
    worker_s = int(rendered.variable("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS")["value"])
    engine_s = int(rendered.argument("--shutdown-timeout"))
    (_, stop_s) = rendered.container["lifecycle"]["preStop"]["exec"]["command"]
    assert 0 < drain_s < worker_s < engine_s
    assert rendered.pod["terminationGracePeriodSeconds"] > engine_s + int(stop_s)


def test_probes_ask_the_engine_and_not_the_bucket(rendered: Rendered) -> None:
    (port,) = rendered.container["ports"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        get = rendered.container[probe]["httpGet"]
        assert get == {"path": "/health", "port": port["name"]}
    start = rendered.container["startupProbe"]
    # Before that nothing restarts it: the bucket alone may take start_timeout_ms.
    allowed_s = start["periodSeconds"] * start["failureThreshold"]
    assert allowed_s > 600 + rendered.settings.start_timeout_ms / 1e3
    assert rendered.settings.on_unavailable == "serve"


def test_the_service_account_is_the_one_terraform_binds(rendered: Rendered) -> None:
    account = rendered.one("ServiceAccount")["metadata"]
    assert rendered.pod["serviceAccountName"] == account["name"]
    for example, variable in (("eks-pod-identity", "pod_identities"), ("eks-irsa", "irsa")):
        path = ROOT / "terraform" / "examples" / example / "main.tf"
        (module,) = hcl2.loads(path.read_text())["module"]
        (arguments,) = module.values()
        bound = arguments[variable]["engine"]
        assert bound["namespace"].strip('"') == account["namespace"]
        assert bound["service_account"].strip('"') == account["name"]
        assert arguments["name"].strip('"') == rendered.settings.bucket


def test_everything_is_in_one_namespace_and_selected_by_one_label(rendered: Rendered) -> None:
    assert {o["metadata"]["namespace"] for o in rendered.objects} == {"inference"}
    deployment = rendered.one("Deployment")["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    assert deployment["selector"]["matchLabels"] == labels
    assert rendered.one("Service")["spec"]["selector"] == labels
    for monitor in (o for o in rendered.objects if o["kind"] == "PodMonitor"):
        assert monitor["spec"]["selector"]["matchLabels"] == labels
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        assert (endpoint["port"], endpoint["path"]) == ("http", "/metrics")


def test_nothing_runs_as_root(rendered: Rendered) -> None:
    assert rendered.pod["securityContext"]["runAsNonRoot"] is True
    assert rendered.container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text()
    user = rendered.pod["securityContext"]
    assert f"USER {user['runAsUser']}:{user['runAsGroup']}" in dockerfile


def test_the_image_is_pinned_to_the_vllm_of_the_dockerfile(rendered: Rendered) -> None:
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text()
    (version,) = re.findall(r"^ARG VLLM_VERSION=(\S+)$", dockerfile, re.M)
    assert rendered.container["image"] == f"s3kv-vllm:{version}"
