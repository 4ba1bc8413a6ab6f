"""What can be said of deploy/Dockerfile without building it."""

from __future__ import annotations

import re
from pathlib import Path

from packaging.requirements import Requirement

from tests.project import extras
from tests.system.deploy.manifests import DOCKERFILE


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


def test_only_extras_that_exist_are_installed() -> None:
    (install,) = arguments("RUN")
    (asked,) = re.findall(r"/opt/s3kv\[([a-z,]+)\]", install)
    assert set(asked.split(",")) <= set(extras())


def test_no_tag_floats() -> None:
    for path in [DOCKERFILE, *Path(DOCKERFILE.parent).rglob("*.yaml")]:
        assert ":latest" not in path.read_text(), path
