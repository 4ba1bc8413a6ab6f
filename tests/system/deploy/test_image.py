"""deploy/Dockerfile builds, on a stand-in for vLLM's image (`stand_in.py` says what that is)."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import s3kv
from tests.project import ROOT, skip_or_fail
from tests.system.deploy.manifests import DOCKERFILE, VLLM_VERSION
from tests.system.deploy.stand_in import BASE, COMPUTES, Buildah, build_base

pytestmark = [
    pytest.mark.infra,
    pytest.mark.nightly,  # wants root, and the right to mount
    pytest.mark.timeout(900),
    pytest.mark.xdist_group("image"),
]
HELD = COMPUTES | {"vllm": VLLM_VERSION}
IMAGE = f"s3kv-vllm:{VLLM_VERSION}"


@pytest.fixture(scope="module")
def buildah(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Buildah]:
    """Without buildah, uv and the right to change roots the tests are skipped, on CI they fail."""
    if shutil.which("buildah") is None or os.geteuid() != 0:
        skip_or_fail("no buildah (Debian's package: buildah), or not root")
    buildah = Buildah(tmp_path_factory.mktemp("buildah"))
    yield buildah
    buildah.close()


def build(buildah: Buildah, *arguments: str) -> tuple[int, str]:
    """`docker build`, as the first lines of the Dockerfile have it."""
    ignored = f"--ignorefile={DOCKERFILE}.dockerignore"
    done = buildah.build(ROOT, IMAGE, f"--file={DOCKERFILE}", ignored, *arguments)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def container(buildah: Buildah, tmp_path_factory: pytest.TempPathFactory) -> str:
    build_base(buildah, tmp_path_factory.mktemp("base"), f"{BASE}:v{VLLM_VERSION}", HELD)
    code, told = build(buildah)
    assert code == 0, told
    done = buildah.run("from", "--pull-never", f"localhost/{IMAGE}")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def inside(buildah: Buildah, container: str, *command: str) -> str:
    done = buildah.run("run", "--isolation=chroot", container, "--", *command)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_command_line_runs_in_the_image_as_its_user(buildah: Buildah, container: str) -> None:
    assert inside(buildah, container, "id", "-u").strip() == "2000"
    assert s3kv.__version__ in inside(buildah, container, "s3kv", "--version")
    assert "my-kv-cache" in inside(buildah, container, "s3kv", "config", "--bucket", "my-kv-cache")


def test_the_engine_would_find_the_plugin(buildah: Buildah, container: str) -> None:
    """s3kv is on the path of the interpreter that runs vLLM, and registers what vLLM looks for."""
    points = inside(
        buildah, container, "python3", "-c",
        "from importlib.metadata import entry_points as e, distribution as d; import json;"
        "print(json.dumps([p.group for p in d('vllm-s3kv').entry_points]))",
    )  # fmt: skip
    assert any(group.startswith("vllm.") for group in json.loads(points)), points


def test_what_computes_is_as_it_was(buildah: Buildah, container: str) -> None:
    told = inside(buildah, container, "cat", "/opt/s3kv/held.txt").split()
    assert sorted(told) == sorted(f"{name}=={version}" for name, version in HELD.items())
    after = inside(
        buildah, container, "python3", "-c",
        "from importlib.metadata import distributions as found;"
        "print(*(f'{one.name}=={one.version}' for one in found()))",
    )  # fmt: skip
    assert set(told) <= set(after.split())


@pytest.mark.parametrize(
    ("version", "packages", "told"),
    [
        ("0.32.9001", {"vllm": "0.32.9001"}, "grep -q"),
        ("0.32.9002", HELD | {"safetensors": "0.0.1"}, "safetensors"),
    ],
    ids=["no torch to hold", "a dependency wants another safetensors"],
)
def test_it_does_not_build_on_what_would_have_to_change(
    buildah: Buildah, tmp_path: Path, version: str, packages: dict[str, str], told: str
) -> None:
    build_base(buildah, tmp_path, f"{BASE}:v{version}", packages)
    code, output = build(buildah, f"--build-arg=VLLM_VERSION={version}")
    assert code != 0
    assert told in output
