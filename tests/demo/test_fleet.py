"""The fleet of `make demo-chat`, with engines that only remember prefixes."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from demo import chat
from demo.board import Board
from demo.conversations import Traffic, begin
from demo.figures import DOLLARS_PER_HOUR, PREFILL_TOKENS_PER_S, Figures, figures_of
from demo.fleet import AT_ONCE, Fleet
from demo.reader import Reader
from lab.engine import Answer, Ask, EngineFailed

CHUNK = 128
TRAFFIC = Traffic()
READER = Reader("bytes", Path(), 0, 4_096, None)
TTFT_S = 0.5


class Ready:
    """A result that is there at once, unless the engine dies before somebody asks for it."""

    def __init__(self, engine: Remembering, value: Any) -> None:
        self._engine, self._value = engine, value

    def done(self) -> bool:
        return True

    def result(self) -> Any:
        if self._engine.dead:
            raise EngineFailed("gone")
        return self._value


class Remembering:
    """An engine that caches every chunk it has seen, in itself and in the bucket. It has no
    processes but one: itself."""

    def __init__(self, name: str, bucket: set[tuple[int, ...]] | None) -> None:
        self.name, self.bucket = name, bucket
        self.dead = False
        self.prompts: list[int] = []
        self._own: set[tuple[int, ...]] = set()
        self._counters: Counter[str] = Counter()

    def launch(self) -> Ready:
        return Ready(self, None)

    def begin_generate(self, asks: list[Ask | list[int]], *, max_tokens: int = 8) -> Ready:
        whole = [one if isinstance(one, Ask) else Ask(one, max_tokens) for one in asks]
        return Ready(self, [asdict(self._answer(list(a.prompt), a.max_tokens)) for a in whole])

    def _answer(self, prompt: list[int], max_tokens: int) -> Answer:
        chunks = [tuple(prompt[:n]) for n in range(CHUNK, len(prompt) + 1, CHUNK)]
        own = _length(chunks, self._own)
        cached = max(own, _length(chunks, self.bucket or ()))
        if self.bucket is not None:
            self._counters["vllm:s3kv_hit_tokens_bucket_total"] += cached - own
            self._counters["vllm:s3kv_io_requests_total{status=2xx,verb=GET}"] += 1
            self.bucket.update(chunks)
        self._own.update(chunks)
        self.prompts.append(len(prompt))
        return Answer([1] * max_tokens, cached, TTFT_S, TTFT_S, "length")

    def generate(self, asks: list[Ask | list[int]], *, max_tokens: int = 8) -> None:
        self.begin_generate(asks, max_tokens=max_tokens)

    def begin_metrics(self) -> Ready:
        return Ready(self, self.metrics())

    def metrics(self) -> dict[str, float]:
        return {name: float(value) for name, value in self._counters.items()}

    def processes(self) -> list[Remembering]:
        return [self]

    def kill(self) -> None:
        self.dead = True


def _length(chunks: Iterable[tuple[int, ...]], known: Iterable[tuple[int, ...]]) -> int:
    return max((len(chunk) for chunk in chunks if chunk in known), default=0)


def run(bucket: set[tuple[int, ...]] | None, console: Console) -> tuple[Fleet, list[str]]:
    told: list[str] = []
    board = Board(console, "With s3kv", TRAFFIC.requests)

    def tell(text: str) -> None:
        told.append(text)
        board.tell(text)

    def engine(name: str) -> Any:
        return Remembering(name, bucket)

    fleet = Fleet(engine, READER, TRAFFIC.answer_tokens, tell, board.tick)
    with board.shown():
        fleet.run(begin(TRAFFIC, READER))
    return fleet, told


def text_console(*, terminal: bool = False) -> Console:
    return Console(file=io.StringIO(), width=80, force_terminal=terminal, color_system=None)


def printed(console: Console) -> str:
    return console.file.getvalue()


def test_a_killed_replica_costs_no_request() -> None:
    fleet, told = run(set(), text_console())
    assert fleet.sent == fleet.figures().requests == TRAFFIC.requests
    assert fleet.repeated == 1
    assert [one.state for one in fleet.replicas] == ["serving", "killed", "serving"]
    assert any("B is killed" in line for line in told)


def test_requests_go_to_the_replicas_in_turn() -> None:
    fleet, _ = run(set(), text_console())
    first, second, third = (one.figures().requests for one in fleet.replicas)
    before, after = int(TRAFFIC.requests * 2 / 5), TRAFFIC.requests - int(TRAFFIC.requests * 3 / 5)
    assert abs(second - before / 2) <= AT_ONCE
    assert third >= after / 2 - AT_ONCE
    assert first == TRAFFIC.requests - second - third


def test_every_token_of_a_prompt_has_one_source() -> None:
    fleet, _ = run(set(), text_console())
    expected = 0
    for conversation in begin(TRAFFIC, READER):
        expected += len(conversation.prompt)
        conversation.answered([1] * TRAFFIC.answer_tokens)
    assert sum(fleet.figures().tokens) == expected
    assert fleet.figures().tokens[1] == 0, "these engines have no host memory"


def test_the_replacement_lives_on_the_bucket() -> None:
    fleet, _ = run(set(), text_console())
    _, _, bucket, computed = fleet.replicas[-1].figures().tokens
    assert bucket > computed > 0
    without, _ = run(None, text_console())
    assert without.replicas[-1].figures().tokens[2] == 0
    assert without.figures().tokens[3] > 1.5 * fleet.figures().tokens[3]


def test_an_engine_that_dies_by_itself_is_an_error() -> None:
    def tell(text: str) -> None:
        if "requests begin" in text:
            fleet.replicas[0].engine.kill()

    def engine(name: str) -> Any:
        return Remembering(name, None)

    fleet = Fleet(engine, READER, TRAFFIC.answer_tokens, tell, lambda fleet: None)
    with pytest.raises(EngineFailed):
        fleet.run(begin(TRAFFIC, READER))


def test_dollars_are_those_of_computing_and_of_the_bucket() -> None:
    hour = int(PREFILL_TOKENS_PER_S * 3_600)
    computing = Figures((0.5,), (0, 0, 0, hour), 0.0)
    assert computing.dollars_per_million == pytest.approx(1e6 * DOLLARS_PER_HOUR)
    gets = figures_of([], {"vllm:s3kv_io_requests_total{status=2xx,verb=GET}": 1_000_000.0})
    assert gets.bucket_dollars == pytest.approx(0.4)
    assert gets.dollars_per_million is None


def test_the_median_and_the_slow_tenth() -> None:
    figures = Figures(tuple(n / 1_000 for n in range(10, 0, -1)), (0, 0, 0, 0), 0.0)
    assert (figures.ttft_ms(0.5), figures.ttft_ms(0.9)) == (5.0, 9.0)


@pytest.mark.parametrize("terminal", [False, True])
def test_what_is_shown_fits_80_columns(terminal: bool) -> None:
    console = text_console(terminal=terminal)
    run(set(), console)
    lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", printed(console)).replace("\r", "\n").split("\n")
    assert max(map(len, lines)) <= 80
    assert ("\x1b" in printed(console)) == terminal
    assert any("C serves" in line for line in lines)


def test_nothing_from_the_bucket_is_a_failure() -> None:
    console = text_console()
    some = Figures((0.1,), (1, 1, 1, 1), 0.0)
    none = Figures((0.1,), (1, 1, 0, 2), 0.0)
    assert chat.verdict(some, some, some, console) == 0
    assert chat.verdict(some, some, none, console) == 1
    assert "Nothing came from the bucket" in printed(console)
