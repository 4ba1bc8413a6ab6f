"""The manifests in deploy/kubernetes as kustomize, a part of kubectl, renders them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from s3kv.config import Config
from tests.project import ROOT

KUBERNETES = ROOT / "deploy" / "kubernetes"


@dataclass(frozen=True)
class Rendered:
    objects: list[dict[str, Any]]

    def one(self, kind: str) -> dict[str, Any]:
        (found,) = (o for o in self.objects if o["kind"] == kind)
        return found

    @property
    def pod(self) -> dict[str, Any]:
        pod: dict[str, Any] = self.one("Deployment")["spec"]["template"]["spec"]
        return pod

    @property
    def container(self) -> dict[str, Any]:
        (container,) = self.pod["containers"]
        return dict(container)

    @property
    def settings(self) -> Config:
        transfer = json.loads(self.one("ConfigMap")["data"]["kv-transfer-config.json"])
        assert transfer["kv_connector"] == "S3KVConnector"
        return Config.parse(transfer["kv_connector_extra_config"])

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
        (volume,) = (v for v in self.pod["volumes"] if v["name"] == name)
        return dict(volume)


def render(folder: Path) -> Rendered:
    """What `kubectl apply --kustomize` would send. Without kubectl the test is skipped, on CI it
    fails."""
    if shutil.which("kubectl") is None:
        pytest.fail("no kubectl") if os.environ.get("CI") else pytest.skip("no kubectl")
    done = subprocess.run(
        ["kubectl", "kustomize", str(folder)],
        capture_output=True, text=True, check=False, timeout=50,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return Rendered(list(yaml.safe_load_all(done.stdout)))
