"""An hour with an agent's traffic, in three minutes: two replicas behind a round-robin proxy.

    make demo-chat                        an S3 of its own on this machine
    S3KV_BUCKET=my-bucket make demo-chat  your bucket; what it writes, it removes

A dozen conversations share a system prompt. One replica is killed in the middle, and replaced. Then
the same happens without s3kv. Exit status: 0, or 1 when nothing came from the bucket to the
replacement, or 130 on Ctrl-C and SIGTERM.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from demo.board import Board, table_of
from demo.conversations import Traffic, begin
from demo.figures import ASSUMED, Figures
from demo.fleet import Fleet
from demo.place import Place, place_to_use
from demo.reader import Reader, reader
from lab.engine import Engine

SETTINGS: Mapping[str, Any] = {"chunk_tokens": 128, "probe_chunks": 1}
SHORT = Traffic(conversations=6, turns=3, system_tokens=1_024, page_tokens=512)


class Act:
    """One run of the traffic, with s3kv or without."""

    def __init__(self, who: Reader, traffic: Traffic, directory: Path, console: Console) -> None:
        self._reader = who
        self._traffic = traffic
        self._directory = directory
        self._console = console

    def play(self, title: str, place: Place | None) -> tuple[Figures, Figures]:
        """Figures of the whole fleet, and of the replacement. place: None is without s3kv."""
        longest = self._traffic.system_tokens + 2 * self._traffic.page_tokens
        board = Board(self._console, title, self._traffic.requests)
        connector, env = None, {}
        if place is not None:
            host_bytes = self._bytes_of(self._traffic.conversations / 2)
            connector = place.connector(**SETTINGS, host_bytes=host_bytes)
            env = place.server.env

        def engine(name: str) -> Engine:
            return Engine(
                self._reader.model,
                connector=connector,
                env=env,
                log_path=self._directory / f"{title}-{name}.log",
                kv_cache_memory_bytes=self._bytes_of(3.5),
                max_model_len=min(self._reader.max_tokens, longest),
                dtype=self._reader.dtype,
            )

        fleet = Fleet(engine, self._reader, self._traffic.answer_tokens, board.tell, board.tick)
        try:
            with board.shown():
                fleet.run(begin(self._traffic, self._reader))
            return fleet.figures(), fleet.replicas[-1].figures()
        finally:
            fleet.end()

    def _bytes_of(self, conversations: float) -> int:
        """The size of their KV. An engine's own cache has room for three or four, and a replica's
        host memory for half of all."""
        tokens = self._traffic.system_tokens + int(conversations * self._traffic.page_tokens)
        return tokens * self._reader.kv_bytes_per_token


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser("demo chat", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--short", action="store_true", help="half the requests, shorter prompts")
    traffic = SHORT if parser.parse_args(arguments).short else Traffic()
    console = Console(highlight=False)
    with tempfile.TemporaryDirectory(prefix="s3kv-demo-") as directory, place_to_use() as place:
        who = reader(Path(directory), console)
        console.print(
            f"{traffic.conversations} conversations of {traffic.turns} turns with {who.name} share "
            f"a system prompt of {traffic.system_tokens} tokens, and go to two replicas in turn. "
            "One replica is killed in the middle, and replaced. First with s3kv, whose bucket is "
            f"in {place.store}, then without.\n"
        )
        act = Act(who, traffic, Path(directory), console)
        ours, our_third = act.play("With s3kv", place)
        plain, plain_third = act.play("Without s3kv", None)
    rows = (
        ("with s3kv", ours),
        ("without", plain),
        ("C with s3kv", our_third),
        ("C without", plain_third),
    )
    console.print()
    console.print(table_of([(Text(name), figures) for name, figures in rows]))
    return verdict(ours, plain, our_third, console)


def verdict(ours: Figures, plain: Figures, third: Figures, console: Console) -> int:
    """Say what the figures come to; the exit status."""
    console.print(f"\n[dim]{ASSUMED}[/]")
    from_bucket = third.tokens[2]
    if from_bucket == 0:
        console.print("[bold red]Nothing came from the bucket to the replacement.[/]")
        return 1
    console.print(
        f"The replacement began with nothing in its memory: [bold]{from_bucket:,}[/] of its "
        f"{sum(third.tokens):,} prompt tokens came from the bucket.\n"
        f"Computed: [bold]{ours.tokens[3]:,}[/] tokens instead of {plain.tokens[3]:,}. Time to "
        f"first token, median: [bold]{ours.ttft_ms(0.5):,.0f} ms[/] instead of "
        f"{plain.ttft_ms(0.5):,.0f} ms."
    )
    return 0
