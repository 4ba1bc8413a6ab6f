"""Board: a fleet's figures in a table, live on a terminal, and a line for each event elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from demo.figures import SOURCES, Figures
from demo.fleet import Fleet

_COLOURS = ("green", "cyan", "magenta", "red")
_SHADES = "█▓▒░"
"""Where there are no colours, they tell the sources apart."""
_STATES = {"starting": "yellow", "serving": "green", "killed": "bold red"}
_REFRESH_S = 0.15


class Board:
    """What is seen of one run of a fleet. total: its requests."""

    def __init__(self, console: Console, title: str, total: int) -> None:
        self._console = console
        self._title = title
        self._total = total
        self._events: list[Text] = []
        self._live: Live | None = None
        self._begun_s = self._shown_s = time.monotonic()
        self._quarter = 0

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show it until the block ends; on a terminal the last state stays."""
        if not self._console.is_terminal or self._console.is_dumb_terminal:
            self._console.print(f"{self._title}:")
            yield
            return
        with Live(console=self._console, auto_refresh=False) as self._live:
            yield
        self._console.print()

    def tell(self, text: str) -> None:
        """Add an event."""
        line = Text.assemble((f"{time.monotonic() - self._begun_s:5.0f} s  ", "dim"), text)
        self._events.append(line)
        if self._live is None:
            self._console.print(line)

    def tick(self, fleet: Fleet) -> None:
        """Show the fleet as it is, unless that was done a moment ago."""
        answered = fleet.figures().requests
        if self._live is None:
            quarter = 4 * answered // self._total
            if self._quarter < quarter < 4:
                self._quarter = quarter
                self.tell(f"{answered} of {self._total} requests are answered")
            return
        now_s = time.monotonic()
        if now_s - self._shown_s < _REFRESH_S and answered < self._total:
            return
        self._shown_s = now_s
        self._live.update(self._state(fleet, now_s), refresh=True)

    def _state(self, fleet: Fleet, now_s: float) -> Group:
        figures = fleet.figures()
        head = Text.assemble(
            (self._title, "bold"),
            f"   {figures.requests} of {self._total} requests, {now_s - self._begun_s:.0f} s",
        )
        rows = [
            (Text.assemble(f"{one.name}  ", (one.state, _STATES[one.state])), one.figures())
            for one in fleet.replicas
        ]
        return Group(
            head, table_of([*rows, (Text("together"), figures)]), bar(figures), *self._events
        )


def table_of(rows: Sequence[tuple[Text, Figures]]) -> Table:
    """A row of figures for each name; 80 columns are enough."""
    table = Table(box=None, padding=(0, 0, 0, 2), pad_edge=False)
    table.add_column("", no_wrap=True)
    for head in ("requests", "TTFT ms\nmedian", "TTFT ms\n90 %"):
        table.add_column(head, justify="right")
    for source, colour in zip(SOURCES, _COLOURS, strict=True):
        table.add_column("\n".join(source.split()), justify="right", style=colour)
    table.add_column("$ per\n10⁶", justify="right")
    for name, figures in rows:
        dollars = figures.dollars_per_million
        table.add_row(
            name,
            f"{figures.requests}",
            *(_milliseconds(figures.ttft_ms(share)) for share in (0.5, 0.9)),
            *(f"{tokens:,}" for tokens in figures.tokens),
            "" if dollars is None else f"{dollars:,.0f}",
        )
    return table


def _milliseconds(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def bar(figures: Figures, width: int = 78) -> Text:
    """Where the tokens of the prompts came from, as a bar and in percent."""
    whole = sum(figures.tokens)
    text, below = Text(), Text()
    until = [
        round(width * sum(figures.tokens[:n]) / max(1, whole)) for n in range(len(SOURCES) + 1)
    ]
    for number, (source, colour) in enumerate(zip(SOURCES, _COLOURS, strict=True)):
        cells = until[number + 1] - until[number]
        text.append(_SHADES[number] * cells, colour)
        share = figures.tokens[number] / max(1, whole)
        below.append(f"{_SHADES[number]} {source} {share:.0%}   ", colour)
    return Text("\n").join([text, below, Text()])
