"""Docstring check: a docstring in s3kv/ starts with what the thing is or does, not with a clause,
and its quotes close on its last line, or below it if it has several paragraphs.

`python -m scripts.check_docstrings` prints each docstring that breaks the rule and exits with 1.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "s3kv"

OPENER = re.compile(
    r"(after|as|at|because|before|behind|beside|between|beyond|by|for|from|how|if|in|of|on|once|since|"
    r"so|that|through|to|under|until|what|when|where|which|while|who|whom|whose|why|with|without)"
    r"(?=[\s.,:;]|$)",
    re.IGNORECASE,
)
"""A sentence that opens with one of these names its subject late or never: "Under which hashes a
request's chunks are kept" is "Chunk hashes of requests"."""

_LAST_LINE = 100 - len('"""')
"""Most columns of a docstring's last line that leave room for the quotes."""

_Described = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def faults(source: str) -> Iterator[tuple[int, str]]:
    """The faults of one module: line and message.

    Private classes and functions are not checked. Others need no docstring, and that of a
    predicate may start with "Whether".
    """
    module = ast.parse(source)
    yield from _closed_elsewhere(module, source.splitlines())
    text = ast.get_docstring(module)
    if text is None:
        yield 1, "the module has no docstring"
    elif found := OPENER.match(text) or re.match(r"Whether\b", text):
        yield 1, f"the module's docstring starts with {found[0]!r}"
    for node in ast.walk(module):
        if isinstance(node, _Described) and (node.name == "__init__" or node.name[0] != "_"):
            found = OPENER.match(ast.get_docstring(node) or "")
            if found:
                yield node.lineno, f"the docstring of {node.name} starts with {found[0]!r}"


def _closed_elsewhere(module: ast.Module, lines: list[str]) -> Iterator[tuple[int, str]]:
    """Docstrings whose closing quotes are on the wrong line. One without room for them is right."""
    for node in ast.walk(module):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))) if "\n" in text:
                end = node.end_lineno or 0
                alone, several = lines[end - 1].strip() == '"""', "\n\n" in text.rstrip()
                room = len(lines[end - 2]) <= _LAST_LINE and lines[end - 2][-1:] != '"'
                if alone != several and (room or not alone):
                    yield end, f"the quotes close {'below' if alone else 'on'} the last line"


def report(faults: Callable[[str], Iterator[tuple[int, str]]]) -> int:
    """Print the faults of the whole package. Returns the exit status."""
    found = [
        f"{path}:{line}: {message}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for line, message in faults(path.read_text("utf-8"))
    ]
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(report(faults))
