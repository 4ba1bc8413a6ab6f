"""Phrase check: texts that an operator reads in s3kv/ use the field's words, one thought at a time.

`python -m scripts.check_english` prints each text with a phrase of `PHRASES` and exits with 1.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator

from scripts.check_docstrings import report

PHRASES = {
    r"(?:is|are|was|were) not what (?:its|their|the) keys? says?": "failed verification",
    r"what|whatever|whoever|that which": "the noun that is meant",
    r"of (?:which|whom|whose)": "a sentence of its own",
    r"tells?|told|says?|said|hears?|heard|owes?|doubts?": "report, log, send, receive",
    r"looks? at|looked at|looking at": "check",
    r"asks? for|(?:be|not) asked|asked for": "request",
    r"from (?:now|here) on": "now, or no longer",
    r"keep(?:s|ing)? (?:the bucket|%s/)": "enforce bucket_bytes",
    r"nobody|somebody": "no request, another process",
    r"(?<!there )(?:is|are) no(?:ne)?": "is not",
    r"for want of": "without",
    r"on (?:its|their) way": "in flight, being saved, being uploaded",
    r"goes on|go on": "continues",
    r"anew": "again",
    r"at hand|here to there|a header more": "plain words",
    r"is to be|are to be|was to be": "must, should",
}
"""Phrases that make a reader go back, as regular expressions, and a better form of each."""

_FOUND = re.compile(rf"\b({'|'.join(PHRASES)})(?!\w)", re.IGNORECASE)


def faults(source: str) -> Iterator[tuple[int, str]]:
    """The faults of one module: line and message.

    Texts are string literals of two words or more, docstrings of settings (class `Config`), and
    docstrings of commands, which are their help. Messages of assertions are for developers.
    """
    module = ast.parse(source)
    ignored = {id(part) for node in ast.walk(module) for part in _internal(node)}
    for node in ast.walk(module):
        if id(node) in ignored or not isinstance(node, ast.Constant):
            continue
        if isinstance(node.value, str) and " " in node.value.strip():
            for found in _FOUND.finditer(node.value):
                yield node.lineno, f"{found[0]!r}: {_better(found[0])}"


def _internal(node: ast.AST) -> Iterator[ast.AST]:
    """The parts of a node that are for developers: assertions, and docstrings of no command and no
    setting."""
    if isinstance(node, ast.Assert):
        yield from ast.walk(node)
    is_read = (isinstance(node, ast.ClassDef) and node.name == "Config") or any(
        "command" in ast.unparse(decorator) for decorator in getattr(node, "decorator_list", ())
    )
    body = [] if is_read else getattr(node, "body", [])
    for statement in body if isinstance(body, list) else []:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            yield statement.value


def _better(phrase: str) -> str:
    return next(form for regex, form in PHRASES.items() if re.fullmatch(regex, phrase, re.I))


if __name__ == "__main__":
    sys.exit(report(faults))
