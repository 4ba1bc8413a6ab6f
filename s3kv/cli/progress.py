"""How far a command has come, for a person who watches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

Report = Callable[[str, int, int | None], None]
"""What is being done, of how many things so far, and of how many in all (None: not known)."""


@contextlib.contextmanager
def bars() -> Iterator[Report]:
    """Progress bars on stderr, gone afterwards; none where stderr is no terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:

        def on_progress(what: str, done: int, total: int | None) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(what, total=total)
            progress.update(tasks[what], completed=done, total=total)

        yield on_progress
