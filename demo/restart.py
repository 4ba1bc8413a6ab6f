"""What s3kv does, in two minutes: an engine reads a document, others answer without reading it.

    make demo                                            an S3 of its own on this machine
    S3KV_BUCKET=my-bucket [AWS_ENDPOINT_URL=…] make demo your bucket; what it writes, it removes
    make demo KEEP=1                                     and keep the bucket until Enter is pressed

Exit status: 0, or 1 when the words differ or nothing came from the bucket, or 130 on Ctrl-C and
SIGTERM.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from demo import stay
from demo.place import Place, place_to_use
from demo.reader import QUESTIONS, Reader, reader
from demo.words import Words
from lab.engine import Answer, Ask, Engine, Pending

CHUNK_TOKENS = 256
"""Also vLLM's block and the prompt tokens of a step. So every engine, whatever it finds cached,
computes the end of a prompt in a step of the same shape, and rounds alike."""
WARM_UP = list(range(2, 102))
ANSWER_TOKENS = 64
KILL_AFTER_TOKENS = 16
SOURCES = {
    "local_compute": "computed",
    "local_cache_hit": "from its own cache",
    "external_kv_transfer": "from the bucket",
}


@dataclass(frozen=True, slots=True)
class Answered:
    """A whole answer of the engine with this name. tokens_from: of the prompt, by `SOURCES`."""

    engine: str
    question: str
    answer: Answer
    tokens_from: dict[str, int]

    @property
    def ttft_ms(self) -> float:
        return 1e3 * (self.answer.ttft_s or self.answer.seconds)

    @property
    def from_bucket(self) -> int:
        return self.tokens_from["external_kv_transfer"]


class Demo:
    """keep: leave in `directory` what the command line wants to know of the engines."""

    def __init__(
        self, who: Reader, place: Place, directory: Path, console: Console, *, keep: bool
    ) -> None:
        self._reader = who
        self._place = place
        self._directory = directory
        self._console = console
        self._keep = keep
        self.answered: list[Answered] = []
        self.cut_off: list[int] = []
        """Tokens of the answer whose engine was killed."""

    def run(self) -> None:
        """Cold; from the bucket in a new process; after a kill."""
        with self._engine("A", "the bucket is empty") as engine:
            for question in QUESTIONS:
                self._ask(engine, "A", question)
            with self._console.status("engine A uploads the rest, and ends"):
                self._note_metrics(engine, "first")
                engine.shutdown()
        objects = self._objects()
        self._console.print(
            f"A has ended, and its memory is gone. In the bucket: {len(objects)} objects, "
            f"{sum(objects.values()) / 1e6:,.0f} MB."
        )
        with self._engine("B", "a new process, which has never seen the document") as engine:
            for question in QUESTIONS[:-1]:
                self._ask(engine, "B", question)
            self._kill_in_the_middle(engine, QUESTIONS[-1])
        with self._engine("C", "another new process") as engine:
            self._ask(engine, "C", QUESTIONS[-1])
            self._note_metrics(engine, "second")

    @contextmanager
    def _engine(self, name: str, state: str) -> Iterator[Engine]:
        tokens = self._reader.max_tokens + 4 * CHUNK_TOKENS
        engine = Engine(
            self._reader.model,
            connector=self._place.connector(chunk_tokens=CHUNK_TOKENS),
            env=self._place.server.env,
            log_path=self._directory / f"{name}.log",
            kv_cache_memory_bytes=tokens * self._reader.kv_bytes_per_token,
            max_model_len=self._reader.max_tokens,
            max_num_batched_tokens=CHUNK_TOKENS,
            block_size=CHUNK_TOKENS,
            dtype=self._reader.dtype,
        )
        with ExitStack() as stack:
            with self._console.status(f"engine {name} starts"):
                stack.enter_context(engine)
                engine.generate([WARM_UP])  # the first request of any engine pays for lazy set-up
            self._console.print(f"\n[bold]Engine {name}[/]: {state}.")
            yield engine

    def _ask(self, engine: Engine, name: str, question: str) -> None:
        before = tokens_by_source(engine)
        pending, words = self._begin(engine, question)
        with self._console.status("it reads"):
            while not pending.done() and not pending.so_far():
                time.sleep(0.01)
        while not pending.done():
            words.show(self._reader.text(pending.so_far()))
            time.sleep(0.01)
        (answer,) = (Answer(**one) for one in pending.result())
        words.show(self._reader.text(answer.tokens), last=True)
        after = tokens_by_source(engine)
        given = {source: after[source] - before[source] for source in SOURCES}
        self.answered.append(Answered(name, question, answer, given))
        self._console.print(
            f"    [bold]first word after {self.answered[-1].ttft_ms:,.0f} ms[/]; tokens: "
            + ", ".join(f"{count:,} {SOURCES[source]}" for source, count in given.items() if count)
        )

    def _kill_in_the_middle(self, engine: Engine, question: str) -> None:
        """Kill all processes of an engine while it answers, as the end of a machine would."""
        pending, words = self._begin(engine, question)
        while len(self.cut_off) < KILL_AFTER_TOKENS and not pending.done():
            self.cut_off = pending.so_far()
            words.show(self._reader.text(self.cut_off))
            time.sleep(0.01)
        engine.kill()
        words.end()
        self._console.print("    [bold red]SIGKILL: engine B is killed in the middle of it.[/]")

    def _begin(self, engine: Engine, question: str) -> tuple[Pending, Words]:
        stop = list(self._reader.stop)
        ask = Ask(self._reader.prompt(question), ANSWER_TOKENS, stop=stop, stream=True)
        self._console.print(f"  [cyan]{question}[/]", highlight=False)
        return engine.begin_generate([ask]), Words(self._console, indent=4)

    def _note_metrics(self, engine: Engine, name: str) -> None:
        """Once all uploads have ended. An engine counts them when it works on the next request."""
        if not self._keep:
            return
        chunks = len(self._reader.prompt("")) // CHUNK_TOKENS
        deadline_s = time.monotonic() + 60.0
        while len(self._objects()) < chunks and time.monotonic() < deadline_s:
            time.sleep(0.1)
        engine.generate([WARM_UP])
        stay.write_metrics(self._directory, name, engine.metrics())

    def _objects(self) -> dict[str, int]:
        return self._place.server.objects(self._place.bucket, self._place.prefix + "/")


def tokens_by_source(engine: Engine) -> dict[str, int]:
    metrics = engine.metrics()
    return {
        source: int(metrics.get(f"vllm:prompt_tokens_by_source_total{{source={source}}}", 0))
        for source in SOURCES
    }


def table_of(firsts: Sequence[tuple[str, Answered]]) -> Table:
    """The first answers of the engines."""
    table = Table(title="Each engine's first answer")
    table.add_column("")
    for column in ("first word after", "computed", "from the bucket"):
        table.add_column(column, justify="right")
    for name, one in firsts:
        computed = one.tokens_from["local_compute"]
        table.add_row(name, f"{one.ttft_ms:,.0f} ms", f"{computed:,}", f"{one.from_bucket:,}")
    return table


def verdict(answered: Sequence[Answered], cut_off: Sequence[int], console: Console) -> int:
    """Say whether all engines gave the words of the first; the exit status."""
    first = {one.question: one.answer.tokens for one in answered if one.engine == "A"}
    later = [one for one in answered if one.engine != "A"]
    for engine in ("B", "C"):
        if not any(one.from_bucket for one in later if one.engine == engine):
            console.print(f"[bold red]Nothing came from the bucket to engine {engine}.[/]")
            return 1
    equal = sum(one.answer.tokens == first[one.question] for one in later)
    begun = first[QUESTIONS[-1]][: len(cut_off)] == list(cut_off)
    same = begun and equal == len(later)
    console.print(
        f"The same words as engine A: {'[bold green]yes' if same else '[bold red]no'}[/], "
        f"{equal} of {len(later)} answers, and {'' if begun else 'not '}the one that was cut off."
    )
    return 0 if same else 1


def main(arguments: list[str]) -> int:
    keep = "--keep" in arguments
    console = Console(highlight=False)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="s3kv-demo-"))
        with console.status("an S3 server starts"):
            place = stack.enter_context(place_to_use())
        with console.status("the model is unpacked"):
            who = reader(Path(folder), console)
        console.print(
            f"{who.name} answers questions about {len(who.prompt('')):,} tokens of this project's "
            f"documents. Their KV, {who.kv_bytes_per_token / 1_000:.0f} kB a token, goes to "
            f"{place.store}, at s3://{place.bucket}/{place.prefix}/."
        )
        demo = Demo(who, place, Path(folder), console, keep=keep)
        demo.run()
        firsts = {one.engine: one for one in reversed(demo.answered)}
        names = {"A": "A, cold", "B": "B, a new process", "C": "C, after the kill"}
        console.print()
        console.print(table_of([(names[one], firsts[one]) for one in names]))
        status = verdict(demo.answered, demo.cut_off, console)
        if keep:
            stay.write_config(Path(folder), place.connector(chunk_tokens=CHUNK_TOKENS))
            print(stay.instructions(Path(folder), place.server.env), flush=True)
            stay.wait_for_enter()
        return status
