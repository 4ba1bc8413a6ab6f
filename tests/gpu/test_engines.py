"""What takes several engines: `s3kv prove`, and the encoder cache.

Each is a part of its own of `python -m scripts.gpu first`, which has more time than a test there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.shaped import FAST, shaped
from lab import models, vision
from lab.engine import ENVIRONMENT, ROOT, Ask, Engine
from scripts.gpu.engine import ON_CUDA, environment

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200)]
PATH = os.environ.get("PYTHONPATH", str(ROOT))


def installed(site: Path) -> Path:
    """A folder in which vLLM finds the plugin of s3kv, which may not be installed as a package."""
    (folder := site / "s3kv-0.dist-info").mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: s3kv\nVersion: 0\n")
    (folder / "entry_points.txt").write_text("[vllm.general_plugins]\ns3kv = vllm_s3kv:register\n")
    return site


def proven(folder: Path, connector: str) -> None:
    """With the engine in the process of each arm, which imports vLLM once and not twice."""
    env = os.environ | ENVIRONMENT | environment("2") | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    env["PYTHONPATH"] = f"{installed(folder / 'site')}{os.pathsep}{PATH}"
    model = models.add_tokenizer(models.build(folder, models.TINY))
    sizes = ["--max-model-len", "2048", "--gpu-memory-utilization", "0.3"]
    sizes += ["--kv-cache-memory-bytes", str(320 * 2**20), "--host-bytes", "64MiB"]
    for option in ("compilation_config", "kernel_config"):
        sizes += [f"--{option.replace('_', '-')}", json.dumps(ON_CUDA[option])]
    with shaped(FAST) as server:
        command = [sys.executable, "-m", "s3kv.cli", "prove", str(model), *sizes]
        command += ["--prompts", "4", "--longest", "1500", "--arms", "host,restart"]
        command += ["--connector", connector, "--json", str(folder / "report.json")]
        command += ["--bucket", "benchmark", "--endpoint-url", server.url, "--region", "us-east-1"]
        assert subprocess.run(command, cwd=ROOT, env=env, check=False).returncode == 0
    report = json.loads((folder / "report.json").read_text())
    assert report["verdict"].startswith("PROVEN: 4 answers are the same as host, restart served")


def test_proof_tier(tmp_path: Path) -> None:
    proven(tmp_path, "auto")


def test_proof_connector(tmp_path: Path) -> None:
    proven(tmp_path, "S3KVConnector")


def test_pictures_are_encoded_once(tmp_path: Path) -> None:
    """By an engine that saves them, and never by a new one, which answers the same."""
    model, asks = vision.build(tmp_path), [Ask([10, 11, 12, 13], images=[n]) for n in range(12)]
    answers, counted = [], []
    with shaped(FAST) as server:
        settings = {"bucket": "benchmark", "endpoint_url": server.url, "region": "us-east-1"}
        settings |= {"host_bytes": "16MiB", "recompute_gate": False, "max_wait_ms": 60_000}
        connector = {
            "ec_connector": "S3ECConnector",
            "ec_connector_module_path": "s3kv.connectors",
            "ec_role": "ec_both",
            "ec_connector_extra_config": settings,
        }
        for ec in (None, connector, connector):
            with Engine(
                model,
                ec_connector=ec,
                log_path=tmp_path / "engine.log",
                env=environment("1") | {"PYTHONPATH": PATH},
                skip_tokenizer_init=False,
                max_model_len=1024,
                kv_cache_memory_bytes=2**28,
                enable_prefix_caching=False,
                **ON_CUDA,
            ) as engine:
                answers.append([answer.tokens for answer in engine.generate(asks)])
                report = engine.call("lab.audit:audit_items") if ec else {"left": {}, "broken": []}
                assert report["broken"] == []
                assert not any(report["left"].values())
                counted.append(engine.metrics())
    assert answers[0] == answers[1] == answers[2]
    assert counted[1]["vllm:s3kv_ec_encoded_total"] == len(asks)
    assert counted[2]["vllm:s3kv_ec_hits_total"] == len(asks)
    assert not counted[2].get("vllm:s3kv_ec_encoded_total")
