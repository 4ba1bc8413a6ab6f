"""The real engine beside s3kv: `python -m scripts.gpu.engine --front tier --out FOLDER`.

A model answers the same prompts four times: cold; from the engine's own cache; from host memory,
after the engine has forgotten its cache and every page is zeroed; and from the bucket, in a new
engine. Tokens and hits of the last three have to be equal, and nothing may be left under way; ends
with 1 if it is not so. Between them it answers other prompts, each cold after the uploads of the
one before have ended ("alone"). The bucket is a server of our own here. The result, written after
each of these, is `gpu-FRONT-MODEL-runner-N.json`.

--front: s3kv as the tier of vLLM's OffloadingConnector, or its own connector; beside them, for
comparison, vLLM's tier of local files, and an engine without a connector.
--model: small ones with random weights that make every page of KV matter, with full attention or
with windows; one of them with as much KV per token as Llama-3-8B; or one of the size of Llama-3-8B
    with vLLM's dummy weights, for times: its KV compresses to a twentieth.
--runner: vLLM's model runner of the first generation, or of the second.
--link: MB/s of the way to the bucket, whose objects then also take 30 ms to their first byte.
    Without it the bucket is as fast as the kernel moves files.
--compile: with torch.compile and vLLM's own choice of CUDA graphs; not in a dry run.
--set: a setting of s3kv, over those given here. Together with --link it is in the result's name.
--device cpu: the CPU build of vLLM, to try the program with.
--dry-run: only what comes before CUDA, see `scripts.gpu.rehearsal`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.shaped import FAST, Shape, shaped
from lab import families, latent, models, s3
from lab.constants import split_connector
from lab.engine import ENGINE_ARGS, ENVIRONMENT, ROOT, Answer, Engine
from lab.offloading import offloading

FRONTS = ("tier", "connector", "files", "none")
TIERS = ("cold", "engine", "host", "bucket")
OURS = ("vllm:s3kv", "vllm:kv_offload")
"""How the names of the metrics begin that the result has."""


@dataclass(frozen=True, slots=True)
class Work:
    """hit_tokens: whole chunks of every prompt, which is a token longer: vLLM computes the last
    token at least. The bytes are those of the engine's cache and of host memory."""

    preset: models.Preset
    prompts: int
    hit_tokens: int
    chunk_tokens: int
    cache_bytes: int
    host_bytes: int
    dummy: bool = False
    family: Callable[[Path], Path] | None = None
    """Builds another model than that of the preset. A chunk of it is a block."""


LLAMA_8B = replace(
    models.FAT,
    name="llama-8b",
    hidden=4096,
    layers=32,
    heads=32,
    intermediate=14_336,
    max_tokens=16_384,
)
_TINY = Work(models.TINY, 8, 1024, 128, 320 * 2**20, 256 * 2**20)
_FAMILY = replace(_TINY, prompts=4, hit_tokens=2304, chunk_tokens=0)
WORKS = {
    "tiny": _TINY,
    "windowed": replace(_TINY, preset=models.WINDOWED),
    "latent": replace(_FAMILY, family=latent.build),
    **{
        family.name.replace("_", "-"): replace(
            _FAMILY, family=partial(families.build, family=family)
        )
        for family in (families.GPT_OSS, families.LFM2, families.GRANITE4)
    },
    "fatter": Work(models.FATTER, 4, 7936, 256, 12 * 2**30, 12 * 2**30),
    "llama-8b": Work(LLAMA_8B, 4, 8192, 256, 12 * 2**30, 12 * 2**30, dummy=True),
}

SIZES = [1, 2, 4, 8]
"""Of the batches for which there are CUDA graphs."""
ON_CUDA: dict[str, Any] = {
    "gpu_memory_utilization": 0.3,  # several engines share the GPU
    "enforce_eager": False,
    # Graphs without torch.compile, which would take a minute of every start.
    "compilation_config": {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": SIZES,
    },
    "kernel_config": {
        # Kernels are compiled when they are needed: the others would take minutes at the start.
        "enable_jit_warmup": False,
        "enable_cutedsl_warmup": False,
        "enable_flashinfer_autotune": False,
    },
}
COMPILED: dict[str, Any] = {"compilation_config": {"cudagraph_capture_sizes": SIZES}}
CREDENTIALS = s3.environment("benchmark", "benchmark") | {"S3KV_ENCRYPTION_KEYS": "5e" * 32}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--front", choices=FRONTS, required=True)
    parser.add_argument("--model", choices=WORKS, default="tiny")
    parser.add_argument("--runner", choices=("1", "2"), default="2")
    parser.add_argument("--link", type=float)
    parser.add_argument("--set", metavar="NAME=VALUE")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="s3kv-engine-") as folder:
        if options.dry_run:
            found = _rehearsed(options, Path(folder))
        else:
            found = {}
            with shaped(_shape(options.link)) as server:
                for found in _served(options, server.url, Path(folder)):
                    _write(options, found)
    _write(options, found)
    return 0 if options.dry_run or options.front == "none" or well(found) else 1


def _write(options: argparse.Namespace, found: dict[str, Any]) -> None:
    keys = ("front", "model", "runner", "device", "link", "set", "compile")
    named = {key: value for key in keys if (value := getattr(options, key)) not in (None, False)}
    path: Path = options.out / f"{_name(options)}.json"
    path.write_text(json.dumps(named | found, indent=2))


def _name(options: argparse.Namespace) -> str:
    rate = f"{options.link:g}" if options.link else None
    more = filter(None, (rate, options.set, "compile" if options.compile else None))
    return name_of(options.front, options.model, options.runner, *more)


def name_of(front: str, model: str, runner: str, *more: str) -> str:
    """Of the result, without a suffix. more: the rate of the link, the setting, "compile"."""
    return "-".join(("gpu", front, model, "runner", runner, *more)).replace("=", "-")


def _shape(link: float | None) -> Shape:
    """Of the bucket's server."""
    return FAST if link is None else replace(FAST, host_mb_s=link, first_byte_ms=30)


def transfer(
    front: str, work: Work, url: str, files: Path, device: str, setting: str | None = None
) -> dict[str, Any] | None:
    """vLLM's kv_transfer_config. No answer depends on how fast anything is."""
    patient = {
        "bucket": "benchmark",
        "endpoint_url": url,
        "region": "us-east-1",
        "recompute_gate": False,
        "max_wait_ms": 60_000,
        "request_timeout_ms": 120_000,
        "compress": "off",
    }
    if setting is not None:
        name, _, value = setting.partition("=")
        patient[name] = value
    if front == "none":
        return None
    if front == "connector":
        own = {"host_bytes": work.host_bytes, "chunk_tokens": work.chunk_tokens, "probe_chunks": 1}
        return {
            "kv_connector": "S3KVConnector",
            "kv_connector_module_path": "s3kv.connectors",
            "kv_role": "kv_both",
            "kv_connector_extra_config": patient | own,
        }
    tier: dict[str, dict[str, Any]] = {
        # By module, because s3kv is not installed as a package where this runs.
        "tier": {"type": "S3Tier", "module_path": "s3kv.connectors.offload_tier"} | patient,
        "files": {"type": "fs", "root_dir": str(files)},
    }
    tokens = {"block_size": work.chunk_tokens} if work.chunk_tokens else {}
    config = offloading(tier[front], work.host_bytes, **tokens)
    if device == "cuda":
        extra = config["kv_connector_extra_config"]
        del extra["spec_module_path"]
        extra["spec_name"] = "TieringOffloadingSpec"
    return config


def environment(runner: str) -> dict[str, str]:
    """Of an engine that finds no package of kernels beside vLLM."""
    return CREDENTIALS | {
        "VLLM_USE_V2_MODEL_RUNNER": "1" if runner == "2" else "0",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_DEEP_GEMM_WARMUP": "skip",
    }


def _engine_args(work: Work, device: str) -> dict[str, Any]:
    """Over `ENGINE_ARGS`."""
    args = {
        "kv_cache_memory_bytes": work.cache_bytes,
        "max_model_len": work.preset.max_tokens,
        "enable_prefix_caching": True,
        **({"load_format": "dummy"} if work.dummy else {}),
    }
    return args | (ON_CUDA if device == "cuda" else {})


def _model(work: Work, folder: Path) -> Path:
    if work.family is not None:
        return work.family(folder)
    if not work.dummy:
        return models.build(folder, work.preset)
    path = folder / work.preset.name
    path.mkdir()
    (path / "config.json").write_text(json.dumps(models.config_of(work.preset)))
    return path


def _rehearsed(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    alone = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    os.environ.update(ENVIRONMENT | environment(options.runner) | alone)
    from scripts.gpu.rehearsal import rehearse  # imports the engine, if that is not done yet

    work = WORKS[options.model]
    work = replace(work, preset=replace(work.preset, layers=2), dummy=True)
    args = ENGINE_ARGS | _engine_args(work, "cuda")
    config = transfer(
        options.front, work, "http://127.0.0.1:1", folder / "files", "cuda", options.set
    )
    if config is not None:
        args["kv_transfer_config"], _ = split_connector(config)
    return rehearse(_model(work, folder), args, options.runner, folder)


def _served(options: argparse.Namespace, url: str, folder: Path) -> Iterator[dict[str, Any]]:
    """What was found so far, after each tier."""
    work = WORKS[options.model]
    prompts = models.prompts(work.prompts + 1, work.hit_tokens + 1)
    config = transfer(options.front, work, url, folder / "files", options.device, options.set)
    model = _model(work, folder)
    answers: dict[str, list[Answer]] = {}
    audits: list[dict[str, Any]] = []
    metrics: dict[str, dict[str, float]] = {}

    def new_engine() -> Engine:
        return Engine(
            model,
            connector=config,
            log_path=options.out / f"{_name(options)}.log",
            env=environment(options.runner)
            | {"PYTHONPATH": os.environ.get("PYTHONPATH", str(ROOT))},
            **_engine_args(work, options.device) | (COMPILED if options.compile else {}),
        )

    def serve(
        engine: Engine, tier: str, asked: Sequence[list[int]] = prompts[1:]
    ) -> dict[str, Any]:
        """And wait until everything is in the bucket."""
        answers[tier] = [*answers.get(tier, ()), *engine.generate(asked)]
        if config is not None:
            audits.append(engine.call("lab.audit:audit"))
        told = engine.metrics()
        metrics[tier] = {name: told[name] for name in told if name.startswith(OURS)}
        return compared(answers, work) | {
            "metrics": metrics,
            "left": [{name: n for name, n in audit["left"].items() if n} for audit in audits],
            "broken": [broken for audit in audits for broken in audit["broken"]],
            "planner": audits[-1]["planner"] if audits else {},
            "rank": audits[-1]["rank"] if audits else {},
        }

    with new_engine() as engine:
        engine.generate(prompts[:1])  # the first one waits for kernels
        for tier in TIERS[:2]:
            yield serve(engine, tier)
        for prompt in models.prompts(work.prompts, work.hit_tokens + 1, seed=2):
            yield serve(engine, "alone", [prompt])
        if config is not None:
            engine.reset_prefix_cache()
            engine.call("lab.on_cpu:touch_kv_cache")
            yield serve(engine, "host")
    if config is not None:
        with new_engine() as engine:
            engine.generate(models.prompts(1, work.hit_tokens + 1, seed=1))
            yield serve(engine, "bucket")


def compared(answers: dict[str, list[Answer]], work: Work) -> dict[str, Any]:
    """The answers of the tiers that have been asked. equal: None until all have been, unless one
    is wrong already.
    """
    right = [same(answers["engine"], answers[tier]) for tier in TIERS[2:] if tier in answers]
    return {
        "equal": all(right) if len(right) == 2 or not all(right) else None,
        "prompts": work.prompts,
        "prompt_tokens": work.hit_tokens + 1,
        "cached_tokens": {tier: [a.cached_tokens for a in each] for tier, each in answers.items()},
        "ttft_ms": {
            tier: [round(1e3 * (a.ttft_s or 0), 2) for a in each] for tier, each in answers.items()
        },
    }


def well(found: dict[str, Any]) -> bool:
    return bool(found["equal"]) and not any(found["left"]) and not found["broken"]


def same(own: Sequence[Answer], other: Sequence[Answer]) -> bool:
    """Whether both are hits of the same lengths, with the same tokens. own: hits in vLLM's own
    cache."""
    one, two = ([(a.cached_tokens, a.tokens) for a in answers] for answers in (own, other))
    return one == two and all(answer.cached_tokens for answer in own)


if __name__ == "__main__":
    sys.exit(main())
