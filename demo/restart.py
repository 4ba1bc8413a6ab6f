"""What s3kv does, in a minute: an engine computes, another one that starts afterwards does not.

    make demo                                            an S3 of its own, in memory
    S3KV_BUCKET=my-bucket [AWS_ENDPOINT_URL=…] make demo your bucket; what it writes, it removes
    make demo KEEP=1                                     and keep the bucket until Enter is pressed

Exit status: 0, or 1 when the tokens differ or nothing came from the bucket, or 130 on Ctrl-C
and SIGTERM.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from demo import stay
from demo.place import Place, place_to_use
from lab import models
from lab.engine import Answer, Engine

MODEL = models.FAT
PROMPTS = models.prompts(6, 1_600, seed=1)
WARM_UP = models.prompts(1, 200, seed=2)[0]
CHUNKS = sum(len(prompt) // 256 for prompt in PROMPTS)  # what the bucket comes to hold
KV_CACHE_BYTES = 1_100 * 2**20  # all prompts stay in the engine's own cache, for comparison
SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")


@dataclass(frozen=True, slots=True)
class Pass:
    """All prompts once through an engine. `tokens_from` is keyed by `SOURCES`."""

    answers: list[Answer]
    tokens_from: dict[str, int]

    @property
    def ttft_ms(self) -> float:
        return 1e3 * statistics.median(a.ttft_s for a in self.answers if a.ttft_s is not None)


class Demo:
    """keep: leave in `directory` what the command line wants to know of the engines."""

    def __init__(self, place: Place, directory: Path, progress: Progress, *, keep: bool) -> None:
        self._keep = keep
        self._place = place
        self._directory = directory
        self._progress = progress
        self._bar = progress.add_task("", total=1 + 2 * 4 + 3 * len(PROMPTS))

    def run(self) -> tuple[Pass, Pass, Pass, dict[str, int]]:
        """Cold, own cache, from the bucket; and what the bucket holds."""
        self._say("building a small model")
        model = models.build(self._directory, MODEL)
        self._step()
        with self._engine(model, "first") as engine:
            cold = self._ask(engine, "first engine, empty bucket")
            own = self._ask(engine, "first engine, its own cache")
            self._say("first engine: sending the rest to the bucket")
            self._note_metrics(engine, "first")
        objects = self._objects()
        self._step()
        with self._engine(model, "second") as engine:
            warm = self._ask(engine, "second engine, from the bucket")
            self._note_metrics(engine, "second")
            self._say("done")
        self._step()
        return cold, own, warm, objects

    @contextmanager
    def _engine(self, model: Path, name: str) -> Iterator[Engine]:
        self._say(f"{name} engine: starting")
        with Engine(
            model,
            connector=self._place.connector(),
            env=self._place.server.env,
            log_path=self._directory / f"{name}-engine.log",
            kv_cache_memory_bytes=KV_CACHE_BYTES,
        ) as engine:
            engine.generate([WARM_UP])  # the first request of any engine pays for lazy set-up
            self._step(3)
            yield engine

    def _ask(self, engine: Engine, what: str) -> Pass:
        before = tokens_by_source(engine)
        answers = []
        for number, prompt in enumerate(PROMPTS, 1):
            self._say(f"{what}: prompt {number} of {len(PROMPTS)}")
            answers += engine.generate([prompt])
            self._step()
        after = tokens_by_source(engine)
        return Pass(answers, {source: after[source] - before[source] for source in SOURCES})

    def _note_metrics(self, engine: Engine, name: str) -> None:
        """Once all uploads have ended. An engine counts them when it works on the next request."""
        if not self._keep:
            return
        deadline_s = time.monotonic() + 60.0
        while len(self._objects()) < CHUNKS and time.monotonic() < deadline_s:
            time.sleep(0.1)
        engine.generate([WARM_UP])
        stay.write_metrics(self._directory, name, engine.metrics())

    def _objects(self) -> dict[str, int]:
        return self._place.server.objects(self._place.bucket, self._place.prefix + "/")

    def _say(self, text: str) -> None:
        self._progress.update(self._bar, description=text)

    def _step(self, steps: int = 1) -> None:
        self._progress.advance(self._bar, steps)


def tokens_by_source(engine: Engine) -> dict[str, int]:
    metrics = engine.metrics()
    return {
        source: int(metrics.get(f"vllm:prompt_tokens_by_source_total{{source={source}}}", 0))
        for source in SOURCES
    }


def table_of(passes: Sequence[tuple[str, Pass]]) -> Table:
    table = Table(title="Time to first token, and where the prompts' tokens came from")
    table.add_column("")
    for column in ("TTFT, median", "computed", "engine's cache", "bucket"):
        table.add_column(column, justify="right")
    for name, one in passes:
        counts = (f"{one.tokens_from[source]:,}" for source in SOURCES)
        table.add_row(name, f"{one.ttft_ms:,.0f} ms", *counts)
    return table


def verdict(own: Pass, warm: Pass, console: Console) -> int:
    """Say whether the bucket's KV is as good as the engine's own; the exit status.

    Only hits of equal length are compared: after a shorter one, more is computed at once, bf16
    rounds differently, and a token may differ without anything being wrong.
    """
    if warm.tokens_from["external_kv_transfer"] == 0:
        console.print("[bold red]Nothing came from the bucket.[/]")
        return 1
    pairs = zip(own.answers, warm.answers, strict=True)
    compared = [(a, b) for a, b in pairs if a.cached_tokens == b.cached_tokens]
    equal = sum(a.tokens == b.tokens for a, b in compared)
    same = equal == len(compared) > 0
    word = "[bold green]yes[/]" if same else "[bold red]no[/]"
    console.print(
        f"Same tokens as with the engine's own cache: {word}, {equal} of {len(compared)} prompts"
    )
    if len(compared) < len(PROMPTS):
        console.print(f"(not compared: {len(PROMPTS) - len(compared)}, of which less was fetched)")
    return 0 if same else 1


def main(arguments: list[str]) -> int:
    keep = "--keep" in arguments
    console = Console()
    console.print(
        f"{len(PROMPTS)} prompts of {len(PROMPTS[0]):,} tokens, one after another, through a small "
        f"Llama with {MODEL.kv_bytes_per_token >> 10} KiB of KV per token (Llama-3-8B has 128)."
    )
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with (
        tempfile.TemporaryDirectory(prefix="s3kv-demo-") as directory,
        place_to_use() as place,
    ):
        with Progress(*columns, console=console, transient=True) as progress:
            cold, own, warm, objects = Demo(place, Path(directory), progress, keep=keep).run()
        rows = [
            ("empty bucket", cold),
            ("same engine again", own),
            ("new engine process", warm),
        ]
        console.print(table_of(rows))
        megabytes = sum(objects.values()) / 1e6
        console.print(
            f"In the bucket: {len(objects)} objects, {megabytes:,.0f} MB, "
            f"at s3://{place.bucket}/{place.prefix}/"
        )
        status = verdict(own, warm, console)
        if keep:
            stay.write_config(Path(directory), place.connector())
            print(stay.instructions(Path(directory), place.server.env), flush=True)
            stay.wait_for_enter()
        return status
