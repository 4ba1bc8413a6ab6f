"""`s3kv config`: what it prints is what vLLM and a shell read back."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest
from click.testing import CliRunner, Result

from s3kv.cli.app import cli
from s3kv.config import Config


def run(*arguments: str) -> Result:
    command = ["config", "--bucket", "my-bucket", *arguments]
    return CliRunner().invoke(cli, command, catch_exceptions=False)


def settings_of(options: dict[str, dict[str, Any]]) -> tuple[Config, Config]:
    return (
        Config.parse(options["--kv-transfer-config"]["kv_connector_extra_config"]),
        Config.parse(options["--ec-transfer-config"]["ec_connector_extra_config"]),
    )


AWKWARD = ("--prefix", "it's/$(HOME)", "--set", "host_bytes=1536MiB", "--set", "verify_tls=false")
MEANT = Config(bucket="my-bucket", prefix="it's/$(HOME)", host_bytes=1536 * 2**20, verify_tls=False)


def test_a_shell_reads_it_back() -> None:
    result = run(*AWKWARD, "--role", "consumer")
    words = shlex.split(result.stdout, comments=True)
    options = {name: json.loads(value) for name, value in zip(words[::2], words[1::2], strict=True)}
    assert settings_of(options) == (MEANT, MEANT)
    assert options["--kv-transfer-config"]["kv_role"] == "kv_consumer"
    assert options["--ec-transfer-config"]["ec_role"] == "ec_consumer"


def test_defaults_are_left_out() -> None:
    document = json.loads(run("--json", "--set", "max_wait_ms=10000").stdout)
    assert document["kv_transfer_config"]["kv_connector_extra_config"] == {"bucket": "my-bucket"}
    assert document["host_memory"] is None


def test_a_wrong_setting_is_refused() -> None:
    result = run("--set", "request_timeout_ms=0")
    assert result.exit_code == 2
    assert "request_timeout_ms is 0" in result.stderr


def test_what_host_memory_holds() -> None:
    found = json.loads(run("--json", "--bytes-per-token", "128KiB").stdout)["host_memory"]
    # A chunk is 256 tokens of 128 KiB, 32 MiB, and a header: 4 GiB hold one less than 128.
    assert found == {
        "bytes_per_token": 131_072,
        "chunk_tokens": 256,
        "chunk_bytes": 32 * 2**20,
        "chunks": 127,
        "tokens": 32_512,
        "host_bytes": 4 * 2**30,
    }
    assert "about 127 chunks: 32,512 tokens" in run("--bytes-per-token", "128KiB").stdout
    shell = run("--bytes-per-token", "64KiB", "--set", "chunk_tokens=512").stdout
    assert "# One chunk is 512 tokens, 32.0 MiB, one object." in shell
    assert shlex.split(shell, comments=True)[0] == "--kv-transfer-config"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--bytes-per-token", "128KiB", "--set", "host_bytes=1MiB"], "at least one chunk"),
        (["--bytes-per-token", "many"], "is not a size"),
        (["--bytes-per-token", "0"], "is 0: allowed is"),
    ],
)
def test_figures_that_do_not_fit(options: list[str], said: str) -> None:
    result = run(*options)
    assert result.exit_code == 2
    assert said in result.stderr
