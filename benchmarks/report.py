"""The benchmarks, one after another, and one page of their results: `python -m benchmarks.report
[NAME ...] [--quick] [--shaped] [--trace FILE] [--out FOLDER]`.

Without names all that need no GPU run, and of those on a trace none without `--trace`. Results are
in FOLDER (build/benchmarks) as NAME.json, the page is FOLDER/index.md. A benchmark that fails is
told on the page; the others run, and this program then ends with 1.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.deadline import ends, say
from benchmarks.origin import ROOT
from scripts import results
from scripts.marks import table

FIGURES = {"all", "commit", "computing"}
"""Parts of a result that a table leaves out."""
RENDERED = {
    "compressed": results.compressed,
    "compression": results.compression,
    "engine": results.engine,
    "peers": results.peers,
    "planner": results.planner,
}


@dataclass(frozen=True, slots=True)
class Program:
    """A benchmark. quick: its arguments for a short run. server, trace: it can be told of one."""

    name: str
    quick: tuple[str, ...] = ("--quick",)
    server: bool = False
    trace: bool = False

    def command(self, options: argparse.Namespace) -> list[str]:
        command = [sys.executable, "-m", f"benchmarks.{self.name}"]
        command += self.quick if options.quick else ()
        if self.server and options.shaped:
            command += ["--shaped"]
        return command + (["--trace", str(options.trace)] if self.trace else [])

    @property
    def about(self) -> str:
        """The first sentence of its description."""
        path = ROOT / "benchmarks" / f"{self.name}.py"
        path = path if path.exists() else ROOT / "benchmarks" / self.name / "__main__.py"
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        return " ".join(text.split("\n\n")[0].split())


PROGRAMS = (
    Program("planner", quick=()),
    Program("compressed"),
    Program("compression"),
    Program("objects", server=True),
    Program("encoder", server=True),
    Program("engine", server=True),
    Program("peers", server=True),
    Program("trace", trace=True),
)


def run(program: Program, options: argparse.Namespace) -> dict[str, Any] | str:
    """The result of a benchmark, or why there is none."""
    path = options.out / f"{program.name}.json"
    path.unlink(missing_ok=True)
    command = program.command(options)
    if program.trace:
        command += ["--json", str(path)]
    say(f"\n{' '.join(command[1:])}")
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, check=False)
    if done.returncode:
        return f"failed with {done.returncode}"
    if not program.trace:  # the others print their result
        path.write_text(done.stdout)
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def section(program: Program, command: Sequence[str], result: dict[str, Any] | str) -> str:
    """A benchmark's part of the page."""
    told = [f"## {program.name}", program.about, f"`{' '.join(['python', *command[1:]])}`"]
    if isinstance(result, str):
        return "\n\n".join([*told, f"**{result}**"])
    if program.name in RENDERED:
        told.append(RENDERED[program.name](result))
    else:
        told.append(table(("", ""), leaves(result)))
    return "\n\n".join([*told, f"At {result.get('commit', 'an unnamed commit')}."])


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The figures of a result, with their names."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if name or key not in FIGURES:
                yield from leaves(inner, f"{name}, {key}" if name else str(key))
    elif isinstance(value, list) and any(isinstance(inner, (dict, list)) for inner in value):
        for number, inner in enumerate(value):
            yield from leaves(inner, f"{name} {number + 1}")
    else:
        yield name, ", ".join(map(str, value)) if isinstance(value, list) else value


@ends(6 * 3600)
def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    by_name = {program.name: program for program in PROGRAMS}
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(by_name))
    parser.add_argument("--quick", action="store_true", help="the short form of each")
    parser.add_argument("--shaped", action="store_true", help="on a server with the shape of S3")
    parser.add_argument("--trace", type=Path, help="a file in Mooncake's form")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "benchmarks")
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - by_name.keys():
        parser.error(f"{', '.join(sorted(unknown))}: allowed are {', '.join(by_name)}")
    options.out.mkdir(parents=True, exist_ok=True)
    sections, failed = [], []
    for program in [by_name[name] for name in options.names] or PROGRAMS:
        begin_s = time.monotonic()
        result = "left out: it needs --trace" if program.trace and not options.trace else ""
        found = result or run(program, options)
        if isinstance(found, str) and not result:
            failed.append(program.name)
        say(f"{program.name}: {time.monotonic() - begin_s:.0f} s")
        sections.append(section(program, program.command(options), found))
    page = options.out / "index.md"
    page.write_text("\n\n".join(["# Benchmarks", *sections]) + "\n")
    print(page)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
