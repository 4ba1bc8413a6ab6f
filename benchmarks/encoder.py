"""Encoder outputs: vLLM's own connector and this one, side by side: `python -m benchmarks.encoder`.

    python -m benchmarks.encoder [--images 24] [--layers 24] [--rounds 3] [--json FILE]

The same images, one after the other, in four engines a round: cold and warm with vLLM's
ECExampleConnector on a local directory, cold and warm with S3ECConnector on a bucket. Cold is an
empty directory or prefix, warm is a new process on what the cold one left. Told are the encoder's
runs, counted in the model, and the milliseconds from sending a request to its answer.

The S3 server: `benchmarks/rig.py`. What the figures say about your machine they do not say about
another: here server, I/O process and engine share the cores, and the local directory is a memory
cache.
"""

from __future__ import annotations

import statistics
import tempfile
import uuid
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.deadline import begin, command_line, ends, say
from benchmarks.rig import Store, add_server, machine, publish, s3
from lab import vision
from lab.engine import Answer, Ask, Engine

_TEXT = [10, 11, 12]


def count(engine: Any) -> None:
    """In the engine's process: count the encoder's runs from now on."""
    model: Any = engine.model_executor.driver_worker.worker.model_runner.model
    encode = model.embed_multimodal
    model.encoder_runs = 0

    def counted(**kwargs: Any) -> Any:
        model.encoder_runs += 1
        return encode(**kwargs)

    model.embed_multimodal = counted


def counted(engine: Any) -> int:
    """In the engine's process: the encoder's runs since `count`."""
    return int(engine.model_executor.driver_worker.worker.model_runner.model.encoder_runs)


class Bench:
    def __init__(self, folder: Path, store: Store, layers: int, images: int) -> None:
        self._folder = folder
        self._store = store
        self._images = images
        self._model = vision.build(folder, encoder_layers=layers)
        self._answers: dict[tuple[str, str], list[Answer]] = defaultdict(list)
        self._runs: dict[tuple[str, str], int] = defaultdict(int)

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
            engine.call("benchmarks.encoder:count")
            self._answers[kind, state] += engine.generate(asks)
            self._runs[kind, state] += engine.call("benchmarks.encoder:counted")

    def result(self) -> dict[str, dict[str, Any]]:
        """By connector and state."""
        told: dict[str, dict[str, Any]] = defaultdict(dict)
        for (kind, state), answers in self._answers.items():
            ms = [1e3 * answer.seconds for answer in answers]
            told[kind][state] = {
                "requests": len(ms),
                "encoder_runs": self._runs[kind, state],
                "request_ms": {"median": statistics.median(ms), "slowest": max(ms)},
            }
        return told


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
        begin(store.name, options.rounds * 600.0)  # one takes a minute
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
        "connectors": bench.result(),
    }
    publish(result, options.json)


if __name__ == "__main__":
    main()
