"""Reads the mistakes in the folder `mistakes`, and makes them.

A mistake is a block of lines, between empty ones: its name; the tool that has to notice it
(`test_mistakes.py` says which tools there are) and the file; after `-` the lines, or parts of them,
that are right; after `+` what somebody wrote instead. A line `tests` begins a change of whatever
file of the module's tests says what was right. Lines after `#` are headings.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

DIRECTORY = Path(__file__).with_name("mistakes")


@dataclass(frozen=True, slots=True)
class Change:
    """file: a path in the module, or "tests" for every file of its tests that has `right`."""

    file: str
    right: str
    wrong: str

    def make(self, module: Path) -> None:
        """Raises `ValueError` when what was right is not there any more."""
        paths = (
            [*(module / "tests").glob("*.hcl")] if self.file == "tests" else [module / self.file]
        )
        changed = [path for path in paths if self.right in path.read_text()]
        if not changed:
            raise ValueError(f"{self.file} has changed, and the mistake has not: {self.right}")
        for path in changed:
            times = -1 if self.file == "tests" else 1
            path.write_text(path.read_text().replace(self.right, self.wrong, times))


@dataclass(frozen=True, slots=True)
class Mistake:
    name: str
    caught_by: str
    changes: tuple[Change, ...]


def mistakes() -> list[Mistake]:
    """All of them, in the order of the files."""
    return [mistake for path in sorted(DIRECTORY.glob("*.txt")) for mistake in _read(path)]


def _read(path: Path) -> list[Mistake]:
    text = "\n".join(line for line in path.read_text().splitlines() if not line.startswith("#"))
    return [_mistake(block.splitlines()) for block in text.split("\n\n") if block.strip()]


def _mistake(lines: list[str]) -> Mistake:
    name, tool_and_file, *rest = [line for line in lines if line]
    tool, file = tool_and_file.split()
    parts: list[tuple[str, list[str]]] = [(file, [])]
    for line in rest:
        if line == "tests":
            parts.append((line, []))
        else:
            parts[-1][1].append(line)
    return Mistake(name, tool, tuple(_change(file, told) for file, told in parts))


def _change(file: str, lines: list[str]) -> Change:
    right, wrong = ([line[2:] for line in lines if line[0] == sign] for sign in "-+")
    # What is taken away without anything in its place goes with its line.
    return Change(file, "\n".join(right) + ("" if wrong else "\n"), "\n".join(wrong))
