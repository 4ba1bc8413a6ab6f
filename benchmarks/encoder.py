"""Encoder outputs: vLLM's own connector and this one, side by side: `python -m benchmarks.encoder`.

    python -m benchmarks.encoder [--images 24] [--layers 24] [--rounds 3] [--json FILE]

The same images, one after the other, in four engines a round: cold and warm with vLLM's
ECExampleConnector on a local directory, cold and warm with S3ECConnector on a bucket. Cold is an
empty directory or prefix, warm is a new process on what the cold one left. Told are

    encoder runs      of all rounds together, counted in the model
    request           milliseconds from sending to the answer, as the client sees it
    scheduler calls   what a request costs in the connector's hooks on the thread that schedules:
                      processor time of all calls, and wall time, the longest call and the shares
                      of the hooks without build_connector_meta of passes that schedule nothing:
                      there s3kv sleeps on purpose, up to 1 ms, until something arrives.

The S3 server: `benchmarks/rig.py`. What the figures say about your machine they do not say about
another: here server, I/O process and engine share the cores, and the local directory is a memory
cache.
"""

from __future__ import annotations

import statistics
import tempfile
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.deadline import begin, command_line, ends, say
from benchmarks.rig import Store, add_server, machine, publish, s3
from lab import vision
from lab.engine import Answer, Ask, Engine

_SCHEDULER_HOOKS = (
    *("ensure_cache_available", "has_cache_item", "update_state_after_alloc"),
    *("build_connector_meta", "update_connector_output", "get_ec_connector_stats"),
    "request_finished",
)
_TEXT = [10, 11, 12]
GIVE_UP_S = 600.0
"""Per round; one takes about a minute."""


class _Watch:
    """In the engine's process: what the hooks took so far."""

    def __init__(self) -> None:
        self.encoder_runs = 0
        self.wall_s: dict[str, float] = defaultdict(float)
        self.cpu_s = 0.0
        self.longest_s = 0.0

    def timed(self, name: str, hook: Any) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            wall_s, cpu_s = time.perf_counter(), time.thread_time()
            try:
                return hook(*args, **kwargs)
            finally:
                cpu_s, wall_s = time.thread_time() - cpu_s, time.perf_counter() - wall_s
                self.cpu_s += cpu_s
                if not any(getattr(arg, "total_num_scheduled_tokens", 1) == 0 for arg in args):
                    self.wall_s[name] += wall_s
                    self.longest_s = max(self.longest_s, wall_s)

        return timed

    def counted(self, encode: Any) -> Any:
        def counted(**kwargs: Any) -> Any:
            self.encoder_runs += 1
            return encode(**kwargs)

        return counted


_WATCH = _Watch()


def watch(engine: Any) -> None:
    """In the engine's process: count encoder runs and time the scheduler's calls from now on."""
    connector: Any = engine.engine_core.engine_core.scheduler.ec_connector
    for name in _SCHEDULER_HOOKS:
        setattr(connector, name, _WATCH.timed(name, getattr(connector, name)))
    model: Any = engine.model_executor.driver_worker.worker.model_runner.model
    model.embed_multimodal = _WATCH.counted(model.embed_multimodal)


def seen(engine: Any) -> dict[str, Any]:
    """In the engine's process: what `watch` has seen."""
    return vars(_WATCH)


class Measured:
    """One connector, cold or warm, over all rounds. watched: what `seen` returned in each."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.watched: list[dict[str, Any]] = []

    def result(self) -> dict[str, Any]:
        requests, watched = len(self.answers), self.watched
        hooks_s = sum((Counter(one["wall_s"]) for one in watched), Counter[str]())
        request_ms = [1e3 * answer.seconds for answer in self.answers]
        return {
            "requests": requests,
            "encoder_runs": sum(one["encoder_runs"] for one in watched),
            "request_ms": {
                "median": round(statistics.median(request_ms), 1),
                "slowest": round(max(request_ms), 1),
            },
            "scheduler_us_per_request": {
                "wall": round(1e6 * hooks_s.total() / requests),
                "processor": round(1e6 * sum(one["cpu_s"] for one in watched) / requests),
                "longest_call": round(1e6 * max(one["longest_s"] for one in watched)),
                "by_hook": {n: round(1e6 * s / requests) for n, s in hooks_s.items()},
            },
        }


class Bench:
    def __init__(self, folder: Path, store: Store, layers: int, images: int) -> None:
        self._folder = folder
        self._store = store
        self._images = images
        self._model = vision.build(folder, encoder_layers=layers)
        self.measured: dict[str, dict[str, Measured]] = defaultdict(lambda: defaultdict(Measured))

    def round(self) -> None:
        name = uuid.uuid4().hex[:8]
        for connector in (self._example(self._folder / name), self._ours(f"bench/{name}")):
            for state in ("cold", "warm"):
                self._engine(connector, state)

    def _example(self, folder: Path) -> dict[str, Any]:
        return {
            "ec_connector": "ECExampleConnector",
            "ec_role": "ec_both",
            "ec_connector_extra_config": {"shared_storage_path": str(folder)},
        }

    def _ours(self, prefix: str) -> dict[str, Any]:
        extra = {"prefix": prefix, "host_bytes": "64MiB", "recompute_gate": False}
        return {
            "ec_connector": "S3ECConnector",
            "ec_connector_module_path": "s3kv.connectors",
            "ec_role": "ec_both",
            "ec_connector_extra_config": self._store.settings | extra,
        }

    def _engine(self, connector: dict[str, Any], state: str) -> None:
        kind = connector["ec_connector"]
        engine = Engine(
            self._model,
            ec_connector=connector,
            log_path=self._folder / f"{kind}-{state}.log",
            env=self._store.env,
            skip_tokenizer_init=False,
            max_model_len=1024,
            kv_cache_memory_bytes=2**26,
            enable_prefix_caching=False,
        )
        # Once through everything, with an image nobody else has: what this saves no other finds.
        warm_up = Ask(_TEXT, images=[uuid.uuid4().int % 2**31 + 1_000], max_tokens=1)
        asks = [Ask(_TEXT, images=[n], max_tokens=1) for n in range(self._images)]
        say(f"engine {kind}, {state}")
        with engine:
            engine.generate([warm_up])
            engine.call("benchmarks.encoder:watch")
            answers = engine.generate(asks)
            watched = engine.call("benchmarks.encoder:seen")
        measured = self.measured[kind][state]
        measured.answers += answers
        measured.watched.append(watched)


@ends(600)
def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line(__doc__, "one round")
    parser.add_argument("--images", type=int, default=24)
    parser.add_argument("--layers", type=int, default=24, help="of the vision tower")
    parser.add_argument("--rounds", type=int, default=3)
    add_server(parser)
    options = parser.parse_args(arguments)
    if options.quick:
        options.rounds = 1
    with s3(options) as store, tempfile.TemporaryDirectory() as folder:
        begin(store.name, options.rounds * GIVE_UP_S)
        bench = Bench(Path(folder), store, options.layers, options.images)
        for number in range(options.rounds):
            say(f"round {number + 1} of {options.rounds}")
            bench.round()
        told = store.told()
    result = {
        "benchmark": "encoder",
        **told,
        "machine": machine(),
        "images": f"{options.images} a round, one per request, {options.rounds} rounds",
        "encoder": f"{options.layers} layers",
        "connectors": {
            kind: {state: measured.result() for state, measured in states.items()}
            for kind, states in bench.measured.items()
        },
    }
    publish(result, options.json)


if __name__ == "__main__":
    main()
