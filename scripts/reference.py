"""docs/api.md: the library's public interface, as its docstrings state it."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Container, Iterator
from itertools import pairwise
from types import ModuleType

from s3kv import config, errors, types
from s3kv.library import tiered_store
from scripts.marks import ROOT, filled

LINE = 88
_Function = ast.FunctionDef | ast.AsyncFunctionDef

PUBLIC: tuple[tuple[ModuleType, str, str, tuple[str, ...]], ...] = (
    (
        tiered_store,
        "TieredStore",
        "s3kv",
        (
            *("open", "put", "get", "prefetch", "where", "acquire", "allocate", "put_block"),
            *("release", "counters", "flush", "close"),
        ),
    ),
    (types, "Location", "s3kv", ()),
    (config, "Config", "s3kv", ("parse",)),
)
"""Where a class is written, its name, where users import it from, and which of its methods."""


def page() -> str:
    """docs/api.md."""
    sections = [section(*public) for public in PUBLIC]
    return filled(ROOT / "docs" / "api.md", {"reference": "\n".join([*sections, _errors()])})


def section(module: ModuleType, name: str, imported: str, methods: tuple[str, ...]) -> str:
    node = _class(module, name)
    fields = {} if name == "Config" else dict(_fields(node))
    lines = [f"## {name}", "", f"`from {imported} import {name}`", ""]
    lines += [*_prose(_doc(node), fields), ""]
    if fields:
        lines += ["```python", *fields.values(), "```", ""]
    if name == "Config":
        lines += ["The fields are the settings: [configuration](configuration.md).", ""]
    found = _functions(node)
    for method in methods:
        lines += [f"### {name}.{method}", "", "```python", signature(found[method]), "```", ""]
        taken = found[method].args
        names = [a.arg for a in (*taken.args, *taken.kwonlyargs)]
        lines += [*_prose(_doc(found[method]), names), ""]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines))


def attribute_docs(module: ModuleType, name: str) -> dict[str, str]:
    """What the texts below a class's fields say of them, each in one line."""
    docs = {}
    for field, text in pairwise(_class(module, name).body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            docs[ast.unparse(field.target)] = " ".join(str(ast.literal_eval(text.value)).split())
    return docs


def _functions(node: ast.ClassDef) -> dict[str, _Function]:
    return {n.name: n for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}


def signature(node: _Function) -> str:
    """How it is declared, without its body; in one line where that fits."""
    decorators = "".join(f"@{ast.unparse(d)}\n" for d in node.decorator_list)
    word = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    assert node.returns is not None
    arguments, end = list(_arguments(node.args)), f") -> {ast.unparse(node.returns)}"
    line = f"{word} {node.name}({', '.join(arguments)}{end}"
    if len(line) > LINE:
        line = "\n    ".join([f"{word} {node.name}(", *(f"{a}," for a in arguments)]) + f"\n{end}"
    return decorators + line


def _arguments(args: ast.arguments) -> Iterator[str]:
    required = len(args.args) - len(args.defaults)
    yield from map(ast.unparse, args.args[:required])
    for argument, default in zip(args.args[required:], args.defaults, strict=True):
        yield f"{ast.unparse(argument)} = {ast.unparse(default)}"
    if args.kwonlyargs:
        yield "*"
    for named, value in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        given = "" if value is None else f" = {ast.unparse(value)}"
        yield ast.unparse(named) + given


def _class(module: ModuleType, name: str) -> ast.ClassDef:
    body = ast.parse(inspect.getsource(module)).body
    return next(n for n in body if isinstance(n, ast.ClassDef) and n.name == name)


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for member in node.body:
        if isinstance(member, ast.AnnAssign):
            yield ast.unparse(member.target), ast.unparse(member)


def _doc(node: ast.ClassDef | _Function) -> str:
    doc = ast.get_docstring(node)
    assert doc, f"{node.name} is public and has no docstring"
    return doc


def _prose(doc: str, names: Container[str]) -> Iterator[str]:
    """A docstring as Markdown: what is said of the arguments `names` becomes a list."""
    item = False
    for line in doc.splitlines():
        word, colon, _ = line.partition(":")
        if colon and word in names:
            yield from ([] if item else [""])
            yield f"- `{word}`{line[len(word) :]}"
            item = True
        elif item and line.startswith("    "):
            yield f"  {line.strip()}"
        else:
            yield from ([""] if item else [])
            item = False
            yield line


def _errors() -> str:
    doc = ast.get_docstring(ast.parse(inspect.getsource(errors)))
    assert doc is not None
    tree = doc[doc.index("    S3KVError") : doc.index("\n\nNone of")]
    drawn = "\n".join(line.removeprefix("    ") for line in tree.splitlines())
    return f"## Errors\n\n`from s3kv.errors import …`\n\n```text\n{drawn}\n```\n"
