"""The manifests in deploy/kubernetes as kustomize, a part of kubectl, renders them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from s3kv.config import Config
from tests.project import ROOT, skip_or_fail

KUBERNETES = ROOT / "deploy" / "kubernetes"
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
(VLLM_VERSION,) = re.findall(r"^ARG VLLM_VERSION=(\S+)$", DOCKERFILE.read_text(), re.M)
VERSIONS = ("1.32", "1.33", "1.34", "1.35", "1.36", "1.37")
ENGINE_BYTES = 24 * 2**30
"""What deploy/README.md says an engine needs beside s3kv's memory and /dev/shm."""


@dataclass(frozen=True)
class Pod:
    """A pod of an engine, whatever made it: one container, and the settings in a ConfigMap."""

    spec: dict[str, Any]
    settings: Config

    @property
    def container(self) -> dict[str, Any]:
        (container,) = self.spec["containers"]
        return dict(container)

    def argument(self, name: str) -> str:
        (value,) = (a.partition("=")[2] for a in self.container["args"] if a.startswith(name))
        return value

    def variable(self, name: str) -> dict[str, Any]:
        (found,) = (v for v in self.container["env"] if v["name"] == name)
        return dict(found)

    def volume(self, mount_path: str) -> dict[str, Any]:
        (name,) = (
            m["name"] for m in self.container["volumeMounts"] if m["mountPath"] == mount_path
        )
        (volume,) = (v for v in self.spec["volumes"] if v["name"] == name)
        return dict(volume)

    @property
    def pre_stop_s(self) -> int:
        if "lifecycle" not in self.container:
            return 0
        (_, stop_s) = self.container["lifecycle"]["preStop"]["exec"]["command"]
        return int(stop_s)

    @property
    def least_grace_s(self) -> float:
        """The shortest terminationGracePeriodSeconds with which a shutdown loses no upload that
        `drain_timeout_s` allows. Fails if vLLM's own timeouts do not leave it that time."""
        worker_s = int(self.variable("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS")["value"])
        engine_s = int(self.argument("--shutdown-timeout"))
        assert worker_s >= 2 * self.settings.drain_timeout_s > 0
        assert engine_s > worker_s
        return self.pre_stop_s + engine_s + 1

    def check_memory(self) -> None:
        """The limit holds s3kv's memory for each GPU, /dev/shm, and the engine itself."""
        resources = self.container["resources"]
        gpus = int(resources["limits"]["nvidia.com/gpu"])
        shm = self.volume("/dev/shm")["emptyDir"]
        assert shm["medium"] == "Memory"
        taken_bytes = gpus * self.settings.host_bytes + nbytes(shm["sizeLimit"]) + ENGINE_BYTES
        assert nbytes(resources["limits"]["memory"]) >= taken_bytes
        assert resources["requests"]["memory"] == resources["limits"]["memory"]

    def check_image_and_user(self) -> None:
        """They are the Dockerfile's, and the user can do no more than a user."""
        assert self.container["image"] == f"s3kv-vllm:{VLLM_VERSION}"
        user = self.spec["securityContext"]
        assert f"USER {user['runAsUser']}:{user['runAsGroup']}" in DOCKERFILE.read_text()
        assert self.container["securityContext"]["capabilities"] == {"drop": ["ALL"]}

    def check_tolerations(self) -> None:
        """It may run on nodes that are for GPUs alone."""
        gpus = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
        assert gpus in self.spec["tolerations"]


@dataclass(frozen=True)
class Rendered:
    objects: list[dict[str, Any]]

    def all(self, kind: str) -> list[dict[str, Any]]:
        return [o for o in self.objects if o["kind"] == kind]

    def one(self, kind: str) -> dict[str, Any]:
        (found,) = self.all(kind)
        return found

    @property
    def settings(self) -> Config:
        transfer = json.loads(self.one("ConfigMap")["data"]["kv-transfer-config.json"])
        assert transfer["kv_connector"] == "S3KVConnector"
        return Config.parse(transfer["kv_connector_extra_config"])

    @property
    def templates(self) -> list[dict[str, Any]]:
        """Of pods: the Deployment's, or a group's leader and follower."""
        if deployments := self.all("Deployment"):
            return [d["spec"]["template"] for d in deployments]
        group = self.one("LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]
        return [group["leaderTemplate"], group["workerTemplate"]]

    @property
    def pods(self) -> list[Pod]:
        return [Pod(template["spec"], self.settings) for template in self.templates]


def nbytes(quantity: str) -> int:
    number, unit = re.fullmatch(r"(\d+)([KMGT]i)", quantity).groups()  # type: ignore[union-attr]
    return int(number) * int(2 ** {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40}[unit])


def render(folder: Path) -> Rendered:
    """What `kubectl apply --kustomize` would send. Without kubectl: skipped, on CI a failure."""
    if shutil.which("kubectl") is None:
        skip_or_fail("no kubectl")
    done = subprocess.run(
        ["kubectl", "kustomize", str(folder)],
        capture_output=True, text=True, check=False, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return Rendered(list(yaml.safe_load_all(done.stdout)))
