"""`s3kv config`: what it prints is what vLLM and a shell read back."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest
from click.testing import CliRunner, Result

from s3kv.cli.app import cli
from s3kv.config import KEYS_VARIABLE, Config


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


def test_keys_of_encryption_are_named_and_not_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEYS_VARIABLE, "0123456789abcdef" * 4)
    file = "/etc/s3kv/keys"
    result = run("--json", "--set", "encryption=aes-gcm", "--set", f"encryption_keys_file={file}")
    settings = json.loads(result.stdout)["kv_transfer_config"]["kv_connector_extra_config"]
    assert settings == {
        "bucket": "my-bucket", "encryption": "aes-gcm", "encryption_keys_file": file
    }  # fmt: skip
    assert "0123456789" not in result.output
