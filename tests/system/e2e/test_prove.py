"""`s3kv prove` on the real engine: honest KV is proven, and a wrong page is found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from click.testing import CliRunner

from lab import models
from lab.engine import ENGINE_ARGS, ENVIRONMENT, ROOT, Engine
from lab.offloading import offloading
from lab.s3 import S3Server
from s3kv.cli.app import cli
from s3kv.prove import arm_process
from tests.system.e2e.conftest import Rig, connector_for

VLLM = ("--enforce-eager", "--dtype", "float32", "--max-model-len", "1024")
pytestmark = pytest.mark.timeout(1_800)
Run = Callable[[list[str], dict[str, str]], tuple[int, str]]
SMALL = ("--prompts", "2", "--longest", "800", "--host-bytes", "64MiB")


def run(arguments: list[str], env: dict[str, str]) -> tuple[int, str]:
    """As users do."""
    command = [sys.executable, "-m", "s3kv.cli", *arguments]
    env = os.environ | env
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def run_here(arguments: list[str], env: dict[str, str]) -> tuple[int, str]:
    """The arms are forked when vLLM is imported."""
    forking = SimpleNamespace(**vars(subprocess) | {"Popen": Engine.zygotes.popen})
    with mock.patch.object(arm_process, "subprocess", forking):
        done = CliRunner().invoke(cli, arguments, env=env)
    return done.exit_code, done.output


def prove(
    s3: S3Server, bucket: str, folder: Path, *options: str, run: Run
) -> tuple[int, dict[str, Any], str]:
    """The exit code, the report and everything that was printed."""
    model = models.add_tokenizer(models.build(folder, models.TINY))
    arguments = ["prove", str(model), *VLLM, "--bucket", bucket, "--endpoint-url", str(s3.url)]
    arguments += ["--kv-cache-memory-bytes", str(ENGINE_ARGS["kv_cache_memory_bytes"])]
    arguments += ["--json", str(folder / "report.json"), *SMALL, *options]
    env = {"PYTHONPATH": str(ROOT), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    code, said = run(arguments, ENVIRONMENT | s3.env | env)
    assert (folder / "report.json").exists(), said
    assert s3.everything(bucket) == {}
    return code, json.loads((folder / "report.json").read_text()), said


@pytest.mark.parametrize("run", [run_here, pytest.param(run, marks=pytest.mark.nightly)])
def test_honest_kv_is_proven_in_every_arm(
    run: Run, s3: S3Server, bucket: str, tmp_path: Path
) -> None:
    code, report, said = prove(s3, bucket, tmp_path, run=run)
    assert code == 0, said
    assert report["verdict"].startswith("PROVEN: 2 answers are the same as host, restart")
    assert report["margins"]["noise"] < 0.01  # float32: what is wrong stands out


@pytest.mark.nightly
def test_the_tier_is_proven(s3: S3Server, bucket: str, tmp_path: Path) -> None:
    tier = {"type": "s3kv", "bucket": bucket, "endpoint_url": str(s3.url)}
    connector = json.dumps(offloading(tier, 64 * 2**20))
    code, report, said = prove(s3, bucket, tmp_path, "--connector-json", connector, run=run)
    assert code == 0, said
    assert report["verdict"].startswith("PROVEN: 2 answers are the same as host, restart")


def test_a_page_that_was_wrong_before_the_digest_is_found(rig: Rig) -> None:
    spoiling = connector_for(rig.s3, rig.bucket) | {
        "kv_connector": "SpoilingConnector",
        "kv_connector_module_path": "tests.system.e2e.spoiling",
    }
    options = ("--arms", "host,restart", "--connector-json", json.dumps(spoiling))
    code, report, said = prove(rig.s3, rig.bucket, rig.tmp_path, *options, run=run_here)
    assert code == 1, said
    assert report["verdict"] == "WRONG: host, restart"
