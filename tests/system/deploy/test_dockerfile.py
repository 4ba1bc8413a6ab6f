"""What can be said of deploy/Dockerfile without building it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.project import ROOT, declared, extras

DOCKERFILE = ROOT / "deploy" / "Dockerfile"


def instructions(text: str) -> list[tuple[str, str]]:
    """(keyword, arguments) of every instruction, continued lines joined, comments left out."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines()
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in joined if line]


ALL = instructions(DOCKERFILE.read_text())


def arguments(keyword: str) -> list[str]:
    return [rest for word, rest in ALL if word == keyword]


def test_the_base_is_an_official_vllm_within_the_range() -> None:
    (argument,) = arguments("ARG")
    (base,) = arguments("FROM")
    assert base == "vllm/vllm-openai:v${VLLM_VERSION}"
    (vllm,) = (Requirement(r) for r in extras()["vllm"])
    assert argument.removeprefix("VLLM_VERSION=") in vllm.specifier


def test_what_is_copied_exists_and_is_sent_to_the_builder() -> None:
    ignore = (DOCKERFILE.parent / "Dockerfile.dockerignore").read_text().splitlines()
    allowed = {line[1:] for line in ignore if line.startswith("!")}
    copied: set[str] = set()
    for copy in arguments("COPY"):
        *sources, target = shlex.split(copy)
        assert target.startswith("/opt/s3kv/")
        copied.update(sources)
    assert "*" in ignore
    assert copied == allowed
    assert all((ROOT / source).exists() for source in copied)


def test_the_package_can_be_built_from_what_is_copied() -> None:
    """What the build reads has to be there: the readme and its hook, the licence, the package."""
    project = declared()
    copied = {source for copy in arguments("COPY") for source in shlex.split(copy)[:-1]}
    assert {
        "pyproject.toml",
        "s3kv",
        "README.md",
        "vllm_s3kv.py",
        "scripts/index_page.py",
        *project["license-files"],
    } <= copied


def test_pip_may_not_replace_what_computes() -> None:
    (install,) = arguments("RUN")
    assert "--constraint /opt/s3kv/held.txt" in install
    (pattern,) = re.findall(r"grep -E '([^']+)'", install)
    held = re.compile(pattern)
    for line in ("torch==2.13.0+cu130", "vllm==0.32.0", "nvidia-nccl-cu13==2.28", "numpy==2.3.1"):
        assert held.match(line), line
    for line in ("aiobotocore==3.1", "botocore==1.42", "torchvision-extra==1", "msgspec==0.21"):
        assert not held.match(line), line
    # An empty list of constraints holds nothing.
    assert "grep -q '^torch=='" in install
    assert "grep -q '^vllm=='" in install


def test_only_extras_that_exist_are_installed() -> None:
    (install,) = arguments("RUN")
    (asked,) = re.findall(r"/opt/s3kv\[([a-z,]+)\]", install)
    assert set(asked.split(",")) <= set(extras())


def test_it_does_not_run_as_root() -> None:
    assert ALL[-1][0] == "USER"
    assert ALL[-1][1] not in ("root", "0", "0:0")


@pytest.mark.parametrize("word", ["ADD", "MAINTAINER"])
def test_nothing_deprecated_is_used(word: str) -> None:
    assert arguments(word) == []


def test_no_tag_floats() -> None:
    for path in [DOCKERFILE, *Path(DOCKERFILE.parent).rglob("*.yaml")]:
        assert ":latest" not in path.read_text(), path
