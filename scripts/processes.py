"""The picture of s3kv's processes, with the folders of the package that each of them imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from s3kv.messages import StepPlan, StepReport
from scripts import svg
from scripts.svg import Box

ROOT = Path(__file__).resolve().parent.parent
ENTRIES = {
    "engine core process": "s3kv.connectors.kv_scheduler",
    "worker process": "s3kv.connectors.kv_worker",
    "I/O process": "s3kv.io.__main__",
}
"""Each process, and the module with which it begins."""


def folders(entry: str) -> list[str]:
    """The folders of the package with modules that `entry` imports, directly or not."""
    todo, seen = [entry], set[str]()
    while todo:
        module = todo.pop()
        if module not in seen and _source(module) is not None:
            seen.add(module)
            todo += _imported(module)
    return sorted({name.split(".")[1] for name in seen if name.count(".") > 1})


def processes() -> str:
    """Who runs where, and what goes between them."""
    roles = (
        ("one per engine, beside vLLM's scheduler", svg.GREEN),
        ("one per rank, beside vLLM's model runner", svg.BLUE),
        ("one per worker, without torch", svg.AMBER),
    )
    boxes = [Box(180, 60 + 135 * i, 346, 74) for i in range(3)]
    drawn = [
        svg.box(at, name, role, ", ".join(folders(entry)), color=color)
        for at, (name, entry), (role, color) in zip(boxes, ENTRIES.items(), roles, strict=True)
    ]
    engine, worker, server = boxes
    return svg.document(
        360,
        430,
        "The engine core process, the worker process and the I/O process",
        svg.arrow(engine, worker, StepPlan.__name__, bend=-70),
        svg.arrow(worker, engine, StepReport.__name__, bend=-70),
        svg.arrow(worker, server, "orders", bend=-70),
        svg.arrow(server, worker, "results", bend=-70),
        *drawn,
        svg.words(180, 390, "A worker and its I/O process map one memory", color=svg.SOFT),
        svg.words(180, 410, "file, the slab: no byte is copied between them.", color=svg.SOFT),
    )


def _source(module: str) -> Path | None:
    if module.split(".")[0] != "s3kv":
        return None
    path = ROOT / module.replace(".", "/")
    return next((p for p in (path.with_suffix(".py"), path / "__init__.py") if p.is_file()), None)


def _imported(module: str) -> Iterator[str]:
    """Names that may be modules: everything imported but for type checkers."""
    source = _source(module)
    assert source is not None
    todo: list[ast.AST] = [ast.parse(source.read_text())]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        todo += ast.iter_child_nodes(node)
