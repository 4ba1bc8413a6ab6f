"""What all benchmarks have: options, an end if they hang, progress on stderr."""

from __future__ import annotations

import argparse
import faulthandler
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def command_line(description: str | None, quick: str) -> argparse.ArgumentParser:
    """A parser with `--quick` and `--json`. quick: what a short run is."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", type=Path, help="write the result there, too")
    return parser


def ends(give_up_s: float) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorator for the `main` of a benchmark: one that has not ended after `give_up_s` prints the
    stacks of its threads and exits with 1. `begin` changes the time."""

    def decorate(main: Callable[P, T]) -> Callable[P, T]:
        @wraps(main)
        def limited(*args: P.args, **kwargs: P.kwargs) -> T:
            faulthandler.dump_traceback_later(give_up_s, exit=True, file=2)
            try:
                return main(*args, **kwargs)
            finally:
                faulthandler.cancel_dump_traceback_later()

        return limited

    return decorate


def begin(server: str, give_up_s: float) -> None:
    """Say against which server this benchmark runs, and give up after `give_up_s` from now."""
    say(f"server: {server}; gives up after {give_up_s:g} s")
    faulthandler.dump_traceback_later(give_up_s, exit=True, file=2)


def say(what: str) -> None:
    """Tell on stderr how far a benchmark is."""
    print(what, file=sys.stderr, flush=True)
