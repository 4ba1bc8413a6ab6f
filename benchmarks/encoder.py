"""Encoder outputs: s3kv beside vLLM's own example connector, on one machine, in one run.

    python -m benchmarks.encoder [--images 12] [--layers 24]

The same images, one after the other, in four engines: cold and warm with vLLM's ECExampleConnector
on a local directory, cold and warm with S3ECConnector on an S3 server in a process of its own
(moto). Warm is a new process. Told are encoder runs, the median and the slowest request, and the
time the engine's scheduler spent in the connector's hooks, all told from inside the engine. Passes
that schedule nothing are left out of that time: there s3kv sleeps on purpose, up to 1 ms, until
something arrives.

What it says about your machine it does not say about another: here server, I/O process and engine
share the cores, and the disk is a memory cache.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from lab import vision
from lab.engine import Answer, Ask, Engine
from lab.s3 import S3Server, moto_process

BUCKET = "encoder-benchmark"
_SCHEDULER_HOOKS = (
    "ensure_cache_available",
    "has_cache_item",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
)
_WATCH: dict[str, float] = {"scheduler_s": 0.0, "longest_s": 0.0, "encoder_runs": 0}


def watch(engine: Any) -> None:
    """In the engine's process: count encoder runs and time the scheduler's calls."""
    connector: Any = engine.engine_core.engine_core.scheduler.ec_connector
    for name in _SCHEDULER_HOOKS:
        setattr(connector, name, _timed(getattr(connector, name)))
    runner = engine.model_executor.driver_worker.worker.model_runner
    encode = runner.model.embed_multimodal

    def counted(**kwargs: Any) -> Any:
        _WATCH["encoder_runs"] += 1
        return encode(**kwargs)

    runner.model.embed_multimodal = counted


def _timed(hook: Any) -> Any:
    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return hook(*args, **kwargs)
        finally:
            seconds = time.perf_counter() - start
            if not any(getattr(arg, "total_num_scheduled_tokens", 1) == 0 for arg in args):
                _WATCH["scheduler_s"] += seconds
                _WATCH["longest_s"] = max(_WATCH["longest_s"], seconds)

    return timed


def seen(engine: Any) -> dict[str, float]:
    """In the engine's process: what `watch` has seen."""
    return _WATCH


def run(
    title: str, model: Path, connector: dict[str, Any], s3: S3Server, images: int, log: Path
) -> None:
    # An image of this run's own: what it saves, no other finds.
    warm_up = 10_000 + sum(title.encode())
    engine = Engine(
        model,
        ec_connector=connector,
        log_path=log,
        env=s3.env,
        skip_tokenizer_init=False,
        max_model_len=1024,
        kv_cache_memory_bytes=2**26,
        enable_prefix_caching=False,
    )
    with engine:
        # Once through everything, with an image that is not measured.
        engine.generate([Ask([10, 11, 12], images=[warm_up], max_tokens=1)])
        engine.call("benchmarks.encoder:watch")
        asks = [Ask([10, 11, 12], images=[n], max_tokens=1) for n in range(images)]
        answers = engine.generate(asks)
        watched = engine.call("benchmarks.encoder:seen")
    print(line(title, answers, watched), flush=True)


def line(title: str, answers: list[Answer], watched: dict[str, float]) -> str:
    times_ms = sorted(1000 * answer.seconds for answer in answers)
    scheduler_ms = 1000 * watched["scheduler_s"] / len(answers)
    return (
        f"{title:24} {watched['encoder_runs']:4.0f} encoder runs   "
        f"{statistics.median(times_ms):7.1f} ms median {times_ms[-1]:7.1f} ms slowest   "
        f"{scheduler_ms:6.2f} ms per request in scheduler calls, "
        f"{1000 * watched['longest_s']:.2f} ms the longest"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--images", type=int, default=12)
    parser.add_argument("--layers", type=int, default=24, help="of the vision tower")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, moto_process() as s3:
        place = Path(name)
        model = vision.build(place, encoder_layers=arguments.layers)
        s3.client().create_bucket(Bucket=BUCKET)
        example = {
            "ec_connector": "ECExampleConnector",
            "ec_role": "ec_both",
            "ec_connector_extra_config": {"shared_storage_path": str(place / "disk")},
        }
        ours = {
            "ec_connector": "S3ECConnector",
            "ec_connector_module_path": "s3kv.connectors",
            "ec_role": "ec_both",
            "ec_connector_extra_config": {
                "bucket": BUCKET,
                "endpoint_url": s3.url,
                "host_bytes": "64MiB",
                "recompute_gate": False,
            },
        }
        for kind, connector in (("ECExampleConnector", example), ("S3ECConnector", ours)):
            for state in ("cold", "warm"):
                log = place / f"{kind}-{state}.log"
                run(f"{kind}, {state}", model, connector, s3, arguments.images, log)


if __name__ == "__main__":
    main()
