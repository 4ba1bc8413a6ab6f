"""The manifests in deploy/: what Kubernetes' schemas say of them, and whether they fit together.

kustomize (a part of kubectl) renders them without a cluster.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from dataclasses import replace
from typing import Any

import hcl2
import kubernetes_validate
import pytest

from s3kv.config import parse_bytes
from s3kv.io.wire import START_TIMEOUT_S
from tests.project import ROOT
from tests.system.deploy.manifests import KUBERNETES, VERSIONS, Pod, Rendered, render
from tests.system.deploy.test_charts import llm_d, production_stack
from tests.versions import serve_parser

OVERLAYS = ("eks-irsa", "encryption", "local-disk", "multi-host", "tensor-parallel")
FOLDERS = ("base", *(f"overlays/{name}" for name in OVERLAYS))
pytestmark = [pytest.mark.infra, pytest.mark.xdist_group("deploy")]


@pytest.fixture(scope="module", params=FOLDERS)
def rendered(request: pytest.FixtureRequest) -> Rendered:
    return render(KUBERNETES / request.param)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_schemas_of_kubernetes_accept_it(rendered: Rendered, version: str) -> None:
    """A LeaderWorkerSet is not Kubernetes' own, but what it makes of its templates is."""
    foreign = ("PodMonitor", "LeaderWorkerSet")
    builtin = [o for o in rendered.objects if o["kind"] not in foreign]
    builtin += [{"apiVersion": "v1", "kind": "Pod"} | made for made in rendered.templates]
    assert len(builtin) == 4 + len(rendered.all("Deployment")) + len(rendered.templates)
    for o in builtin:
        kubernetes_validate.validate(o, version, strict=True)


def test_the_settings_are_what_the_engine_and_the_command_line_get(rendered: Rendered) -> None:
    assert rendered.settings.bucket == "my-kv-cache"
    for pod in rendered.pods:
        assert pod.argument("--kv-transfer-config") == "$(KV_TRANSFER_CONFIG)"
        reference = pod.variable("KV_TRANSFER_CONFIG")["valueFrom"]["configMapKeyRef"]
        assert reference["name"] == rendered.one("ConfigMap")["metadata"]["name"]
        assert reference["key"] in rendered.one("ConfigMap")["data"]
        assert pod.volume("/etc/s3kv")["configMap"]["name"] == reference["name"]


def test_the_memory_limit_holds_what_is_taken(rendered: Rendered) -> None:
    for pod in rendered.pods:
        gpus = pod.container["resources"]["limits"]["nvidia.com/gpu"]
        assert int(pod.argument("--tensor-parallel-size")) == int(gpus)
        pod.check_memory()


def test_a_shutdown_leaves_time_for_uploads(rendered: Rendered) -> None:
    for pod in rendered.pods:
        assert pod.spec["terminationGracePeriodSeconds"] >= pod.least_grace_s


def test_probes_ask_the_engine_and_not_the_bucket(rendered: Rendered) -> None:
    (pod, *followers) = rendered.pods
    (port,) = pod.container["ports"]
    probes = ("startupProbe", "readinessProbe", "livenessProbe")
    for probe in probes:
        assert pod.container[probe]["httpGet"] == {"path": "/health", "port": port["name"]}
    start = pod.container["startupProbe"]
    # Before that nothing restarts it: the bucket alone may take START_TIMEOUT_S.
    assert start["periodSeconds"] * start["failureThreshold"] > 600 + START_TIMEOUT_S
    assert rendered.settings.on_unavailable == "serve"
    for follower in followers:  # which has no API to ask
        assert not {*probes, "ports"} & follower.container.keys()


def test_the_service_account_is_the_one_terraform_binds(rendered: Rendered) -> None:
    account = rendered.one("ServiceAccount")["metadata"]
    assert {pod.spec["serviceAccountName"] for pod in rendered.pods} == {account["name"]}
    for example, variable in (("eks-pod-identity", "pod_identities"), ("eks-irsa", "irsa")):
        path = ROOT / "terraform" / "examples" / example / "main.tf"
        (module,) = hcl2.loads(path.read_text())["module"]
        (arguments,) = module.values()
        bound = arguments[variable]["engine"]
        assert bound["namespace"].strip('"') == account["namespace"]
        assert bound["service_account"].strip('"') == account["name"]
        assert arguments["name"].strip('"') == rendered.settings.bucket


def test_everything_is_in_one_namespace_and_selected_by_its_labels(rendered: Rendered) -> None:
    assert {o["metadata"]["namespace"] for o in rendered.objects} == {"inference"}
    labels = [template["metadata"]["labels"] for template in rendered.templates]
    for deployment in rendered.all("Deployment"):
        assert [deployment["spec"]["selector"]["matchLabels"]] == labels
    # Who answers requests is the first: a Deployment's pod, or a group's leader.
    assert rendered.one("Service")["spec"]["selector"] == labels[0]
    assert labels[0] not in labels[1:]
    for selecting in rendered.all("PodMonitor") + rendered.all("PodDisruptionBudget"):
        selected = selecting["spec"]["selector"]["matchLabels"].items()
        assert all(selected <= found.items() for found in labels)
    for monitor in rendered.all("PodMonitor"):
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        assert (endpoint["port"], endpoint["path"]) == ("http", "/metrics")


def test_a_drained_node_costs_one_replica_and_a_fleet_is_spread(rendered: Rendered) -> None:
    budget = rendered.one("PodDisruptionBudget")["spec"]
    assert budget["maxUnavailable"] == 1
    for pod in rendered.pods:
        pod.check_tolerations()
    for deployment in rendered.all("Deployment"):
        assert deployment["spec"]["replicas"] > budget["maxUnavailable"]
        spread = rendered.pods[0].spec["topologySpreadConstraints"]
        places = ["kubernetes.io/hostname", "topology.kubernetes.io/zone"]
        assert [s["topologyKey"] for s in spread] == places
        labels = deployment["spec"]["selector"]["matchLabels"]
        assert all(s["labelSelector"]["matchLabels"] == labels for s in spread)


def test_a_group_is_one_engine() -> None:
    rendered = render(KUBERNETES / "overlays" / "multi-host")
    group = rendered.one("LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]
    assert group["restartPolicy"] == "RecreateGroupOnPodRestart"
    leader, follower = rendered.pods
    assert follower.container["args"] == [*leader.container["args"], "--headless"]
    for name in ("--nnodes", "--pipeline-parallel-size"):
        assert leader.argument(name) == "$(LWS_GROUP_SIZE)"
    assert leader.argument("--node-rank") == "$(LWS_WORKER_INDEX)"
    assert leader.argument("--master-addr") == "$(LWS_LEADER_ADDRESS)"
    # Hosts of a group, and so ranks of the engine, are equal in everything else.
    alike = ("env", "image", "resources", "securityContext", "volumeMounts", "lifecycle")
    assert [leader.container[k] for k in alike] == [follower.container[k] for k in alike]


def test_the_disk_is_the_nodes_and_the_directory_is_made_by_s3kv() -> None:
    rendered, base = (render(KUBERNETES / folder) for folder in ("overlays/local-disk", "base"))
    settings, (pod,) = rendered.settings, rendered.pods
    mounted, name = os.path.split(settings.disk_path)
    assert name, "a mount has the mode that the kubelet gives it"
    volume = pod.volume(mounted)["hostPath"]
    assert volume["type"] == "Directory"
    text = (KUBERNETES / "overlays/local-disk/kustomization.yaml").read_text()
    owner = pod.spec["securityContext"]["runAsUser"]
    assert f"install --directory --owner={owner} {volume['path']}" in text
    (limit,) = re.findall(r"sizeLimit: (\S+)", text)
    assert (parse_bytes(f"{limit}B") or 0) > settings.disk_bytes
    assert replace(settings, disk_path=None, disk_bytes=0) == base.settings


def test_the_keys_are_in_a_secret_that_the_user_of_the_pod_can_read() -> None:
    rendered, base = (render(KUBERNETES / folder) for folder in ("overlays/encryption", "base"))
    settings, (pod,) = rendered.settings, rendered.pods
    assert settings.encryption == "aes-gcm"
    mounted, key = os.path.split(settings.encryption_keys_file)
    secret = pod.volume(mounted)["secret"]
    assert secret["defaultMode"] == 0o440, "root's files, for root's group"
    assert pod.spec["securityContext"]["runAsGroup"] == 0
    assert "optional" not in secret
    assert not rendered.all("Secret"), "keys belong in no file of a repository"
    text = (KUBERNETES / "overlays/encryption/kustomization.yaml").read_text()
    assert f"create secret generic {secret['secretName']} --from-file={key}" in text
    assert replace(settings, encryption="off", encryption_keys_file=None) == base.settings


def test_image_and_user_are_the_dockerfiles_and_nothing_runs_as_root(rendered: Rendered) -> None:
    for pod in rendered.pods:
        pod.check_image_and_user()
        assert pod.spec["securityContext"]["runAsNonRoot"] is True


SETTINGS = (KUBERNETES / "base" / "kv-transfer-config.json").read_text()
GROUP = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "engine-0.engine"}
"""What the controller of a LeaderWorkerSet sets, here for a follower."""


@pytest.fixture(scope="module")
def parser() -> Any:
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
