"""`s3kv doctor`: its output, its exit code, its remedies, what it hands to the host's checks, and
the finding on the keys of `encryption`, with moto's KMS."""

from __future__ import annotations

import base64
import json
import re
import time
from pathlib import Path

import pytest

from s3kv.cli.doctor.findings import is_permission, remedy_for
from s3kv.cli.doctor.master_keys import examine
from s3kv.config import KEYS_VARIABLE, SECRET_VARIABLE, Config
from s3kv.errors import StoreDenied, StoreError, StoreMissing, StoreUnavailable
from s3kv.objects.encryption import MasterKey
from tests import servers
from tests.unit.cli.conftest import Run
from tests.unit.cli.doctor.conftest import SMALL, findings

pytestmark = pytest.mark.usefixtures("no_torch")


def test_a_fault_is_exit_code_1_with_its_remedy_beneath(run: Run) -> None:
    result = run("doctor", bucket="no-such-bucket")
    assert result.exit_code == 1
    fault = next(line for line in result.stdout.splitlines() if line.startswith("fault"))
    assert fault.split()[1] == "list"
    assert "→ create the bucket" in result.stdout
    document = run("doctor", "--json", bucket="no-such-bucket")
    assert json.loads(document.stdout)["healthy"] is False


def test_findings_come_in_the_order_in_which_they_were_looked_for(run: Run) -> None:
    result = run("doctor", *SMALL)
    assert result.exit_code == 0, result.output
    found = list(findings(result))
    assert found[:2] == ["client", "list"]
    host = ["memory", "shm", "killed engines", "memlock", "hash seed", "vllm", "compression", "gpu"]
    assert found[-8:] == host


def test_options_reach_the_checks_of_the_host(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    options = ("--workers", "3", "--hash-algo", "xxhash", "--read-only")
    found = findings(run("doctor", *SMALL, *options))
    assert "× 3 workers" in found["memory"]["detail"]
    assert "3 workers" in found["shm"]["detail"]
    assert found["hash seed"]["status"] == "fault"
    assert found["put"]["detail"] == "not checked with --read-only"


def test_the_memory_of_a_tier_is_its_connectors(run: Run, tmp_path: Path) -> None:
    file, tiers = tmp_path / "transfer.json", [{"type": "s3kv", "bucket": "bkt"}]
    extra = {"cpu_bytes_to_use": 2**50, "secondary_tiers": tiers}
    several = {"connectors": [{"kv_connector": "x"}, {"kv_connector_extra_config": extra}]}
    for held in (extra, several):
        file.write_text(json.dumps({"kv_connector_extra_config": held}))
        found = findings(run("doctor", *SMALL, "--config", str(file)))
        assert [found[check]["status"] for check in ("memory", "shm")] == ["fault"] * 2
        assert "cpu_bytes_to_use" in found["memory"]["detail"]


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (StoreDenied("no", code="AccessDenied"), "allow s3:GetObject on arn:x for these"),
        (StoreDenied("no"), "allow s3:GetObject on arn:x for these"),
        (StoreDenied("no", code="ExpiredToken"), "renew the credentials"),
        (StoreDenied("no", code="SomethingNew"), "check the credentials"),
        (StoreMissing("no", code="NoSuchBucket"), "create the bucket"),
        (StoreMissing("no"), "check region and endpoint_url"),
        (StoreError("no", region="eu-west-1"), "set region to 'eu-west-1'"),
        (StoreUnavailable("no"), "check endpoint_url and the path to the store"),
        (StoreUnavailable("no", code="unresolved"), "no such host"),
        (StoreError("no", code="botocore"), "check AWS_PROFILE"),
        (StoreError("no"), "it should name an S3 server"),
    ],
)
def test_remedies(error: StoreError, remedy: str) -> None:
    assert remedy in remedy_for(error, "s3:GetObject", "arn:x")


def test_what_concerns_the_call_and_not_the_caller() -> None:
    assert is_permission(StoreDenied("no", code="AccessDenied"))
    assert not is_permission(StoreDenied("no", code="InvalidAccessKeyId"))
    assert not is_permission(StoreUnavailable("no"))
    assert not is_permission(None)


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
