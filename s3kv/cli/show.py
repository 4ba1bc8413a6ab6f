"""Output for a terminal: tables, grids and progress bars. Text from a bucket is printed as text,
never as markup."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TaskID
from rich.table import Column, Table
from rich.text import Text

from s3kv.config import size as size
from s3kv.upkeep.sweep import Report as Report

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S
Cell = str | Text


def numbers(*names: str) -> list[Column]:
    """Columns for numbers, for `print_table`."""
    return [Column(name, justify="right") for name in names]


def print_table(columns: Sequence[str | Column], rows: Iterable[Sequence[Cell]]) -> None:
    """Print rows below their column names."""
    _print(Table(*columns, box=None), rows)


def print_grid(rows: Iterable[Sequence[Cell]]) -> None:
    """Print rows without column names."""
    _print(Table.grid(padding=(0, 2)), rows)


def _print(table: Table, rows: Iterable[Sequence[Cell]]) -> None:
    """Print a table with these rows. Long words are folded, not cut off."""
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    for column in table.columns:
        column.overflow = "fold"
    Console().print(table)


@contextlib.contextmanager
def bars(clock_s: Callable[[], float] | None = None) -> Iterator[Report]:
    """Progress bars on stderr, removed at the end; none if stderr is not a terminal."""
    tasks: dict[str, TaskID] = {}
    console = Console(stderr=True)
    progress = Progress(
        *Progress.get_default_columns(),
        MofNCompleteColumn(),
        console=console,
        transient=True,
        get_time=clock_s,
        disable=not console.is_terminal,  # else an empty line would be printed at the end
    )
    with progress:

        def on_progress(what: str, done: int, total: int | None) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(what, total=total)
            progress.update(tasks[what], completed=done, total=total)

        yield on_progress


def age(seconds: float) -> str:
    """An age in minutes, hours or days."""
    if seconds < HOUR_S:
        return f"{max(seconds, 0.0) / 60:.0f} min"
    return f"{seconds / HOUR_S:.0f} h" if seconds < 2 * DAY_S else f"{seconds / DAY_S:.0f} d"
