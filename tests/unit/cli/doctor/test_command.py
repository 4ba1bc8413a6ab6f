"""`s3kv doctor`: its output, its exit code, and what it hands to the checks of the host."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

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
    host = ["memory", "shm", "memlock", "hash seed", "vllm", "compression", "gpu"]
    assert found[-7:] == host


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
