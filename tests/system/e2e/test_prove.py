"""`s3kv prove` on the real engine: honest KV is proven, and a wrong page is found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lab import models
from lab.engine import ENGINE_ARGS, ENVIRONMENT, ROOT
from lab.offloading import offloading
from lab.s3 import S3Server
from tests.system.e2e.conftest import Rig

VLLM = ("--enforce-eager", "--dtype", "float32", "--max-model-len", "1024")
SMALL = ("--prompts", "2", "--longest", "800", "--host-bytes", "64MiB")


def prove(
    s3: S3Server, bucket: str, folder: Path, *options: str
) -> tuple[int, dict[str, Any], str]:
    """The exit code, the report and everything that was printed."""
    model = models.add_tokenizer(models.build(folder, models.TINY))
    command = [sys.executable, "-m", "s3kv.cli", "prove", str(model), *VLLM]
    command += ["--kv-cache-memory-bytes", str(ENGINE_ARGS["kv_cache_memory_bytes"])]
    command += ["--json", str(folder / "report.json"), *SMALL, *options]
    done = subprocess.run(
        [*command, "--bucket", bucket, "--endpoint-url", str(s3.url)],
        cwd=ROOT,
        env=os.environ | ENVIRONMENT | s3.env | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    said = done.stdout + done.stderr
    assert (folder / "report.json").exists(), said
    assert s3.everything(bucket) == {}
    return done.returncode, json.loads((folder / "report.json").read_text()), said


@pytest.mark.e2e
@pytest.mark.timeout(1_800)
def test_honest_kv_is_proven_in_every_arm(s3: S3Server, bucket: str, tmp_path: Path) -> None:
    code, report, said = prove(s3, bucket, tmp_path)
    assert code == 0, said
    assert report["verdict"].startswith("PROVEN: 2 answers are the same as host, restart")
    assert report["margins"]["noise"] < 0.01  # float32: what is wrong stands out


@pytest.mark.e2e
@pytest.mark.nightly
@pytest.mark.timeout(1_800)
def test_the_tier_is_proven(s3: S3Server, bucket: str, tmp_path: Path) -> None:
    tier = {"type": "s3kv", "bucket": bucket, "endpoint_url": str(s3.url)}
    connector = json.dumps(offloading(tier, 64 * 2**20))
    code, report, said = prove(s3, bucket, tmp_path, "--connector-json", connector)
    assert code == 0, said
    assert report["verdict"].startswith("PROVEN: 2 answers are the same as host, restart")


@pytest.mark.e2e
@pytest.mark.timeout(1_800)
def test_a_page_that_was_wrong_before_the_digest_is_found(rig: Rig) -> None:
    settings = {"bucket": rig.bucket, "endpoint_url": rig.s3.url, "host_bytes": "64MiB"}
    spoiling = {
        "kv_connector": "SpoilingConnector",
        "kv_connector_module_path": "tests.system.e2e.spoiling",
        "kv_role": "kv_both",
        "kv_connector_extra_config": settings,
    }
    arms = ("--arms", "host,restart")
    code, report, said = prove(
        rig.s3, rig.bucket, rig.tmp_path, *arms, "--connector-json", json.dumps(spoiling)
    )
    assert code == 1, said
    assert report["verdict"] == "WRONG: host, restart"
