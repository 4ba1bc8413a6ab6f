"""The real engine beside s3kv: `python -m scripts.gpu.engine --runner 2 --out FOLDER`.

A small Llama with random weights answers the same prompts four times: cold; from the engine's own
cache; from s3kv's host memory, after the engine has forgotten its cache and every page is zeroed;
and from the bucket, in a new engine. Tokens and hits of the last three have to be equal, and
nothing may be left under way; ends with 1 if it is not so. The bucket is a server of our own here.
The result is written after each of the four.

--runner: vLLM's model runner of the first generation, or of the second.
--device cpu: the CPU build of vLLM, to try the program with.
--dry-run: only what comes before CUDA, see `scripts.gpu.rehearsal`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.shaped import FAST, shaped
from lab import models
from lab.constants import split_connector
from lab.engine import ENGINE_ARGS, ENVIRONMENT, ROOT, Answer, Engine

CHUNK_TOKENS = 128
HIT_TOKENS = 8 * CHUNK_TOKENS
"""The engine computes at least the last token of a prompt: here it is alone in its chunk."""
PROMPTS = 8
TIERS = ("cold", "engine", "host", "bucket")

ON_CUDA: dict[str, Any] = {
    "attention_backend": "TRITON_ATTN",
    # Every layer by its function in torch: there may be no compiled kernels.
    "compilation_config": {"mode": 0, "custom_ops": ["none"]},
    "kernel_config": {
        "ir_op_priority": {"rms_norm": ["native"], "fused_add_rms_norm": ["native"]},
        # Kernels are compiled when they are needed: the others would take minutes at the start.
        "enable_jit_warmup": False,
        "enable_cutedsl_warmup": False,
        "enable_flashinfer_autotune": False,
    },
}
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "benchmark",
    "AWS_SECRET_ACCESS_KEY": "benchmark",
    "AWS_EC2_METADATA_DISABLED": "true",
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runner", choices=("1", "2"), required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="s3kv-engine-") as folder:
        model = models.build(Path(folder), models.TINY)
        log = options.out / f"gpu-runner-{options.runner}.log"
        if options.dry_run:
            found = _rehearsed(model, options.runner, Path(folder))
            log.write_text("".join(f"{name}: {way}\n" for name, way in found["layers"].items()))
        else:
            with shaped(FAST) as server:
                found = {}
                for found in _served(model, options.runner, options.device, server.url, log):
                    _write(options, found)
    _write(options, found)
    return 0 if options.dry_run or well(found) else 1


def _write(options: argparse.Namespace, found: dict[str, Any]) -> None:
    result = {"runner": options.runner, "device": options.device} | found
    path: Path = options.out / f"gpu-runner-{options.runner}.json"
    path.write_text(json.dumps(result, indent=2))


def connector(url: str) -> dict[str, Any]:
    """vLLM's kv_transfer_config. No answer depends on how fast anything is."""
    return {
        "kv_connector": "S3KVConnector",
        "kv_connector_module_path": "s3kv.connectors",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "bucket": "benchmark",
            "endpoint_url": url,
            "region": "us-east-1",
            "host_bytes": "256MiB",
            "chunk_tokens": CHUNK_TOKENS,
            "recompute_gate": False,
            "max_wait_ms": 60_000,
            "probe_chunks": 1,
            "request_timeout_ms": 120_000,
        },
    }


def environment(runner: str) -> dict[str, str]:
    """Of an engine that finds no package of kernels either."""
    return CREDENTIALS | {
        "VLLM_USE_V2_MODEL_RUNNER": "1" if runner == "2" else "0",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_DEEP_GEMM_WARMUP": "skip",
    }


def _rehearsed(model: Path, runner: str, folder: Path) -> dict[str, Any]:
    # vLLM remembers what it has seen of a model; the next machine remembers nothing.
    fresh = {"VLLM_CACHE_ROOT": str(folder / "cache"), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    os.environ.update(ENVIRONMENT | environment(runner) | fresh)
    from scripts.gpu.rehearsal import rehearse

    transfer, _ = split_connector(connector("http://127.0.0.1:1"))
    return rehearse(model, ENGINE_ARGS | ON_CUDA | {"kv_transfer_config": transfer}, runner, folder)


def _served(model: Path, runner: str, device: str, url: str, log: Path) -> Iterator[dict[str, Any]]:
    """What was found so far, after each tier."""
    prompts = models.prompts(PROMPTS, HIT_TOKENS + 1)
    answers: dict[str, list[Answer]] = {}
    audits = []

    def new_engine() -> Engine:
        return Engine(
            model,
            connector=connector(url),
            log_path=log,
            env=environment(runner) | {"PYTHONPATH": os.environ.get("PYTHONPATH", str(ROOT))},
            **(ON_CUDA if device == "cuda" else {}),
        )

    def serve(engine: Engine, tier: str) -> dict[str, Any]:
        """And wait until everything is in the bucket."""
        answers[tier] = engine.generate(prompts)
        audits.append(engine.call("lab.audit:audit"))
        return compared(answers) | {
            "left": [{name: n for name, n in audit["left"].items() if n} for audit in audits],
            "broken": [broken for audit in audits for broken in audit["broken"]],
            "planner": audits[-1]["planner"],
            "rank": audits[-1]["rank"],
        }

    with new_engine() as engine:
        for tier in TIERS[:2]:
            yield serve(engine, tier)
        engine.reset_prefix_cache()
        engine.call("lab.on_cpu:touch_kv_cache")
        yield serve(engine, "host")
    with new_engine() as engine:
        yield serve(engine, "bucket")


def compared(answers: dict[str, list[Answer]]) -> dict[str, Any]:
    """The answers of the tiers that have been asked. equal: None until all have been, unless one
    is wrong already.
    """
    right = [
        same(answers["engine"], answers[tier]) and hit(answers[tier])
        for tier in TIERS[2:]
        if tier in answers
    ]
    return {
        "equal": all(right) if len(answers) == len(TIERS) or not all(right) else None,
        "prompts": PROMPTS,
        "cached_tokens": {tier: [a.cached_tokens for a in each] for tier, each in answers.items()},
        "ttft_ms": {
            tier: [round(1e3 * (a.ttft_s or 0), 2) for a in each] for tier, each in answers.items()
        },
    }


def well(found: dict[str, Any]) -> bool:
    return bool(found["equal"]) and not any(found["left"]) and not found["broken"]


def same(one: Sequence[Answer], other: Sequence[Answer]) -> bool:
    return [a.tokens for a in one] == [a.tokens for a in other]


def hit(answers: Sequence[Answer]) -> bool:
    return all(answer.cached_tokens == HIT_TOKENS for answer in answers)


if __name__ == "__main__":
    sys.exit(main())
