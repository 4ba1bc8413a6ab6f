"""The finding on the keys of `encryption`, with moto's KMS."""

from __future__ import annotations

import base64
import json
import re
import time
from pathlib import Path

import pytest

from s3kv.cli.doctor.master_keys import examine
from s3kv.config import KEYS_VARIABLE, SECRET_VARIABLE, Config
from s3kv.objects.encryption import MasterKey
from tests import servers
from tests.unit.cli.conftest import Run
from tests.unit.cli.doctor.conftest import SMALL, findings

KEYS = ["0123456789abcdef" * 4, "f" * 64]
SPEEDS = r"; one thread encrypts \d+\.\d GB/s and decrypts \d+\.\d GB/s"
ON = ("--set", "encryption=aes-gcm")


def test_without_encryption_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEYS_VARIABLE, "no key")
    assert examine(Config(bucket="bkt"), time.perf_counter) == []


def test_keys_and_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEYS_VARIABLE, "\n".join(KEYS))
    times_s = iter([0.0, 2**20 / 2e9] * 6)
    config = Config(bucket="bkt", encryption="aes-gcm")
    (finding,) = examine(config, lambda: next(times_s))
    first = MasterKey(bytes.fromhex(KEYS[0])).id
    said = (
        f"2 keys; the first, {first}, encrypts; one thread encrypts 2.0 GB/s and decrypts 2.0 GB/s"
    )
    assert (finding.check, finding.status, finding.detail) == ("encryption", "ok", said)


@pytest.mark.usefixtures("no_torch")
def test_the_command_asks_kms_for_the_keys(
    run: Run, url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_KMS", url)
    told = base64.b64encode(servers.data_key(url)).decode()
    (tmp_path / "keys").write_text(f"kms:{told}\n{KEYS[0]}\n")
    options = (*SMALL, *ON, "--set", f"encryption_keys_file={tmp_path}/keys")
    result = run("doctor", *options)
    assert result.exit_code == 0, result.output
    found = findings(result)["encryption"]
    assert found["status"] == "ok"
    assert re.fullmatch(r"2 keys; the first, [0-9a-f]{8}, encrypts" + SPEEDS, found["detail"])

    monkeypatch.setenv("AWS_ENDPOINT_URL_KMS", "http://127.0.0.1:1")
    result = run("doctor", *options)
    assert result.exit_code == 1
    assert json.loads(result.stdout)["healthy"] is False
    found = findings(result)["encryption"]
    assert found["status"] == "fault"
    assert found["detail"].startswith(f"key 1 in encryption_keys_file '{tmp_path}/keys': KMS does")
    assert "To do: check the way to KMS" in found["detail"]
    assert told[:16] not in result.output


@pytest.mark.usefixtures("no_torch")
@pytest.mark.parametrize(
    ("keys", "variable"),
    [("", KEYS_VARIABLE), (KEYS[0][:-1], KEYS_VARIABLE), ("", SECRET_VARIABLE)],
)
def test_without_a_key_no_host_is_well(
    keys: str, variable: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, keys)
    options = ON if variable == KEYS_VARIABLE else ("--set", "integrity=blake3-keyed")
    result = run("doctor", *SMALL, *options)
    assert result.exit_code == 1
    found = findings(result)[options[1].partition("=")[0]]
    assert (found["status"], variable in found["detail"]) == ("fault", True)
    assert "give this host the keys" in found["remedy"]
    assert KEYS[0][:8] not in result.output
