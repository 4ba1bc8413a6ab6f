"""The command group: its commands, and what all of them promise."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from s3kv import __version__
from s3kv.cli.app import cli
from tests.project import ROOT
from tests.unit.cli.commands import prepare
from tests.unit.cli.conftest import refused

COMMANDS = {"config", "cost", "doctor", "gc", "ls", "prove", "serve", "verify"}
WITHOUT_BUCKET = {"cost"}


def test_the_commands() -> None:
    assert set(cli.commands) == COMMANDS
    version = CliRunner().invoke(cli, ["--version"])
    assert version.output.strip().endswith(__version__)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_help_says_what_the_exit_codes_mean(name: str) -> None:
    result = CliRunner().invoke(cli, [name, "--help"])
    assert result.exit_code == 0
    assert "EXIT CODES" in result.output
    first = cli.commands[name].get_short_help_str(limit=200)
    assert first.endswith(".")
    assert first[0].isupper()


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_option_says_what_it_does(name: str) -> None:
    options = [p for p in cli.commands[name].params if isinstance(p, click.Option)]
    assert [option.name for option in options if not option.help] == []
    named = {option.name for option in options}
    assert named & {"as_json", "json_file"}
    settings = {"bucket", "prefix", "region", "endpoint_url", "file", "assign"}
    assert (settings <= named) == (name not in WITHOUT_BUCKET)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ([], "bucket is missing"),
        (["--bucket", "bkt", "--set", "request_timeout_ms=0"], "request_timeout_ms is 0"),
    ],
)
@pytest.mark.parametrize("name", sorted(COMMANDS - WITHOUT_BUCKET))
def test_a_setting_that_is_missing_or_wrong_is_wrong_use(
    name: str, settings: list[str], said: str
) -> None:
    needed = {"prove": ["model"], "serve": ["model"], "gc": ["--max-bytes", "1GiB"]}
    refused(CliRunner().invoke(cli, [name, *needed.get(name, []), *settings]), said)


WITHOUT = """
import sys
for name in ("numpy", "torch", "vllm"):
    sys.modules[name] = None  # importing it fails
import vllm_s3kv
vllm_s3kv.main()
"""


@pytest.mark.long
def test_no_command_needs_torch(url: str, boto: Any, tmp_path: Path) -> None:
    commands = prepare(boto, url, tmp_path)
    assert {arguments[0] for arguments in commands.values()} == COMMANDS - {"prove"}  # runs vLLM
    for arguments in commands.values():
        done = subprocess.run(
            [sys.executable, "-c", WITHOUT, *arguments],
            env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, (arguments, done.stdout, done.stderr)
