"""Write the parts of the documentation that follow from the code: `python -m scripts.render_docs`.

A test fails when what stands there is not what this would write.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import click

from s3kv import config
from s3kv.cli.app import cli
from scripts import compatibility, costs, format_example, metrics, reference, results
from scripts.marks import ROOT, filled, table


def configuration() -> str:
    """docs/configuration.md: every setting, in the order of `Config`."""
    meanings = reference.attribute_docs(config, "Config")
    rows = [_row(field, meanings[field.name]) for field in dataclasses.fields(config.Config)]
    settings = table(("setting", "default", "allowed", "meaning"), rows)
    return filled(ROOT / "docs" / "configuration.md", {"settings": settings})


def _row(field: dataclasses.Field[Any], meaning: str) -> tuple[str, ...]:
    if field.default is dataclasses.MISSING:
        default = "required"
    elif config.is_bytes(field.name):
        default = config.size(field.default).replace(".0 ", " ")
    else:
        default = "–" if field.default is None else f"`{str(field.default).lower()}`"
    return f"`{field.name}`", default, config.allowed(field.name), meaning


def command_line() -> str:
    """docs/cli.md: the help of every command."""
    commands = [("s3kv", cli), *((f"s3kv {name}", c) for name, c in sorted(cli.commands.items()))]
    sections = []
    for name, command in commands:
        context = click.Context(command, info_name=name, terminal_width=100)
        sections.append(f"## {name}\n\n```text\n{command.get_help(context)}\n```\n")
    return filled(ROOT / "docs" / "cli.md", {"commands": "\n".join(sections)})


def documents() -> dict[str, Callable[[], str]]:
    """Everything that is rendered: its path from the root, and what writes it."""
    return {
        "README.md": results.readme,
        "docs/api.md": reference.page,
        "docs/cli.md": command_line,
        "docs/compatibility.md": compatibility.page,
        "docs/configuration.md": configuration,
        "docs/cost.md": costs.page,
        "docs/metrics.md": metrics.page,
        "docs/object-format.md": format_example.page,
        "docs/peers-benchmark.md": results.peers_page,
        "docs/performance.md": results.page,
    }


if __name__ == "__main__":
    for path, write in documents().items():
        (ROOT / path).write_text(write())
