"""From terraform to a pod: the manifests of deploy/kubernetes take the outputs as they are."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.system.deploy.manifests import KUBERNETES, Rendered, render
from tests.system.infra.terraform import Plan

WRITTEN, PLANNED = "us-east-1", "eu-west-1"
"""The region in the manifests, as in the example, and that of all plans in the module's tests."""


@pytest.fixture
def manifests(tmp_path: Path) -> Path:
    return Path(shutil.copytree(KUBERNETES, tmp_path / "kubernetes"))


def told(rendered: Rendered) -> dict[str, Any]:
    """Everything rendered but the digest in the settings' name, by kind."""
    settings = rendered.one("ConfigMap")
    text = json.dumps(rendered.objects).replace(settings["metadata"]["name"], "s3kv")
    found = {o["kind"]: o for o in json.loads(text.replace(PLANNED, WRITTEN))}
    data = found["ConfigMap"]["data"]
    found["ConfigMap"]["data"] = {name: json.loads(value) for name, value in data.items()}
    return found


def test_a_pod_takes_printed_settings_as_they_are(plans: dict[str, Plan], manifests: Path) -> None:
    """What is checked of the manifests holds for them with the example's output, too."""
    printed = plans["example_eks_pod_identity"].outputs["kv_transfer_config"]
    (manifests / "base" / "kv-transfer-config.json").write_text(printed)
    rendered = render(manifests / "base")
    assert rendered.settings.region == PLANNED
    assert rendered.one("ConfigMap")["data"]["kv-transfer-config.json"] == printed
    assert told(rendered) == told(render(KUBERNETES / "base"))


def test_irsa_takes_the_printed_role_as_it_is(plans: dict[str, Plan], manifests: Path) -> None:
    outputs = plans["example_eks_irsa"].outputs
    (manifests / "base" / "kv-transfer-config.json").write_text(outputs["kv_transfer_config"])
    folder = manifests / "overlays" / "eks-irsa"
    (folder / "role.env").write_text(f"role_arn={outputs['role_arn']}\n")
    rendered = render(folder)
    assert rendered.one("ServiceAccount")["metadata"]["annotations"] == {
        "eks.amazonaws.com/role-arn": outputs["role_arn"]
    }
    written = told(render(KUBERNETES / "overlays" / "eks-irsa"))
    assert told(rendered) | {"ServiceAccount": None} == written | {"ServiceAccount": None}
