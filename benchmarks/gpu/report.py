"""A result that is written part by part: a run that is cut short has not been for nothing."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any

from benchmarks.deadline import say
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.shapes import CHUNK_TOKENS


def command_line(description: str | None, *, seconds: float, mib: int) -> argparse.ArgumentParser:
    """What every benchmark here can be told. seconds, mib: unless it is told otherwise."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    told = parser.add_argument
    told("--out", type=Path, help="write everything there, part by part")
    told("--device", default="cuda", choices=("cuda", "cpu"))
    told("--seconds", type=float, default=seconds, help=f"begin no part after ({seconds:g})")
    told("--rounds", type=int, default=7, help="that are counted (7)")
    told("--mib", type=int, default=mib, help=f"that are moved in a round ({mib})")
    return parser


class Report:
    """options: those of the command line; after `seconds` of them no part is begun any more, and
    what is left out is named in the result. more: what the result says of itself."""

    def __init__(
        self, benchmark: str, machine: Machine, options: argparse.Namespace, **more: Any
    ) -> None:
        named = ((name, getattr(options, name)) for name in ("device", "rounds", "mib", "seconds"))
        self._document = {
            "benchmark": benchmark,
            "options": dict(named),
            "chunk_tokens": CHUNK_TOKENS,
            **more,
            **machine.describe(),
            "parts": {},
            "left_out": [],
        }
        self._out: Path | None = options.out
        self._since_s = monotonic()
        self._end_s = self._since_s + options.seconds
        self._write()

    def part(self, name: str, measure: Callable[[], Any]) -> None:
        """Measure and write one part, unless time is up."""
        if monotonic() >= self._end_s:
            self._document["left_out"].append(name)
            say(f"left out, there is no time: {name}")
        else:
            begin_s = monotonic()
            self._document["parts"][name] = measure()
            say(f"{name}: {monotonic() - begin_s:.1f} s")
        self._write()

    def finish(self) -> dict[str, Any]:
        """Everything."""
        self._document["seconds"] = round(monotonic() - self._since_s, 1)
        self._write()
        return self._document

    def _write(self) -> None:
        if self._out is not None:
            self._out.parent.mkdir(parents=True, exist_ok=True)
            self._out.write_text(json.dumps(self._document, indent=2) + "\n")
