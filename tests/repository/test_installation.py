"""The documented installations, word for word, and the command line without anything else."""

from __future__ import annotations

import os
import re
import subprocess
import sysconfig
import venv
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests import servers
from tests.project import ROOT
from tests.repository.test_docs import DOCUMENTS
from tests.unit.cli.commands import prepare

pytestmark = [pytest.mark.long, pytest.mark.timeout(600), pytest.mark.xdist_group("packaging")]

MOST_BYTES = 100_000_000
COMMAND_LINE = "pip install '.[cli]'"
BESIDE_VLLM = {"pip install .", "pip install '.[torch]'"}
INSTALLED = re.compile(r"pip install '(?:vllm-)?s3kv\[[a-z]+\]'")
"""What adds an extra to a distribution that is installed already."""


def shell(command: str, environment: Path, more: Mapping[str, str] | None = None) -> str:
    """What the command prints in the checkout with the environment activated."""
    kept = {n: v for n, v in os.environ.items() if n not in ("PYTHONPATH", "VIRTUAL_ENV")}
    path = f"{environment / 'bin'}:{kept['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=ROOT, env=kept | {"PATH": path} | dict(more or {}), capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def folder_of(environment: Path) -> Path:
    (found,) = (environment / "lib").glob("python*/site-packages")
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean environment with the command line."""
    environment = tmp_path_factory.mktemp("alone")
    venv.create(environment, with_pip=True)
    shell(COMMAND_LINE, environment)
    return environment


def test_the_documented_installations_are_these() -> None:
    found = {
        command.strip()
        for document in DOCUMENTS
        if document.name != "CHANGELOG.md"
        for command in re.findall(r"pip install [^\n`#]*", document.read_text())
        if "s3kv" in command or " ." in command or "'." in command
    }
    assert {c for c in found if not INSTALLED.fullmatch(c)} == BESIDE_VLLM | {COMMAND_LINE}


def test_the_command_line_is_small(alone: Path) -> None:
    site = folder_of(alone)
    tools = ("pip", "setuptools", "pkg_resources", "_distutils_hack")
    nbytes = sum(
        path.stat().st_size
        for path in site.rglob("*")
        if path.is_file() and not path.relative_to(site).parts[0].startswith(tools)
    )
    assert nbytes <= MOST_BYTES
    assert not [n for n in ("torch", "numpy", "vllm") if (site / n).exists()]


def test_every_command_works(alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    servers.set_credentials(monkeypatch)
    with servers.moto_server() as url:
        boto = servers.boto_client(url, servers.KEYS)
        commands = prepare(boto, url, tmp_path)
        del commands["serve"]  # it needs vLLM
        for name, arguments in commands.items():
            words = " ".join(f"'{argument}'" for argument in arguments)
            assert shell(f"s3kv {words}", alone), name


def test_an_extra_can_be_added_as_the_messages_say(alone: Path) -> None:
    """The distribution is there, so pip asks the index only for what the extra names."""
    shell("pip install 'vllm-s3kv[integrity]' && python -c 'import blake3'", alone)


def test_the_installations_beside_vllm(tmp_path: Path) -> None:
    venv.create(tmp_path / "env", with_pip=True)
    site = folder_of(tmp_path / "env")
    # A path file adds one folder and reads no path files in it, so an editable s3kv stays behind.
    (site / "ours.pth").write_text(sysconfig.get_path("purelib") + "\n")
    for command in sorted(BESIDE_VLLM):
        shell(command, tmp_path / "env")
    code = "import s3kv.library.tiered_store, vllm_s3kv; print(s3kv.__file__)"
    where = shell(f"cd {tmp_path} && python -c '{code}'", tmp_path / "env")
    assert Path(where.strip()).is_relative_to(site)
    assert not (site / "torch").exists()
