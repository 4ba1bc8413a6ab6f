"""The tables beside this file, and what vLLM's sources say there is to put into them.

Sources are parsed and not imported, so that any version can be looked at without installing it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.project import tomllib

HERE = Path(__file__).parent
FINGERPRINT, BLOCK_HASH, REFUSED, NO = "fingerprint", "block hash", "refused", "no"


@dataclass(frozen=True, slots=True)
class Row:
    """One field. at: its place in the fingerprint, dotted; empty where it is not in there."""

    group: str
    name: str
    where: str
    at: str
    why: str
    first: str
    last: str

    def in_version(self, version: str) -> bool:
        return (not self.first or _number(self.first) <= _number(version)) and (
            not self.last or _number(version) <= _number(self.last)
        )


def table(name: str) -> list[Row]:
    """The rows of one of the tables, one per field."""
    groups = tomllib.loads((HERE / f"{name}.toml").read_text())
    return [
        row
        for group, entries in groups.items()
        for names, where, why in entries
        for row in _rows(group, names, where, why)
    ]


def _rows(group: str, names: str, where: str, why: str) -> Iterator[Row]:
    kind, _, at = where.partition(": ")
    if kind not in (FINGERPRINT, BLOCK_HASH, REFUSED, NO) or not why:
        raise ValueError(f"{group}: {names!r} has where={where!r}, why={why!r}")
    for name in names.split():
        plain, _, versions = name.partition("@")
        first, _, last = versions.partition("-")
        yield Row(group, plain, kind, at, why, first, last)


def wrong(package: Path, version: str) -> list[str]:
    """What the tables say of one version of vLLM and its sources do not, and the other way round.

    package: the directory that has vLLM's `config` and `envs.py`.
    """
    there = {f"config.toml: {name}" for name in config_fields(package)}
    there |= {f"environment.toml: {name}" for name in environment_variables(package)}
    told = [f"config.toml: {r.group}.{r.name}" for r in table("config") if r.in_version(version)]
    told += [f"environment.toml: {r.name}" for r in table("environment") if r.in_version(version)]
    found = [f"{name} has no row" for name in sorted(there - set(told))]
    found += [f"{name} is not in vLLM {version}" for name in sorted(set(told) - there)]
    return found + [f"{name} has two rows" for name in sorted(set(told)) if told.count(name) > 1]


def config_fields(package: Path) -> set[str]:
    """`Class.field` of every annotated field of every class in vLLM's configuration."""
    return {
        f"{node.name}.{statement.target.id}"
        for file in (package / "config").glob("*.py")
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.ClassDef)
        for statement in node.body
        if isinstance(statement, ast.AnnAssign)
        and isinstance(statement.target, ast.Name)
        and "ClassVar" not in ast.dump(statement.annotation)
    }


def environment_variables(package: Path) -> set[str]:
    """The keys of vLLM's own table of the variables it reads."""
    for node in ast.parse((package / "envs.py").read_text()).body:
        target = getattr(node, "target", None)
        if isinstance(target, ast.Name) and target.id == "environment_variables":
            value = getattr(node, "value", None)
            assert isinstance(value, ast.Dict)
            return {key.value for key in value.keys if isinstance(key, ast.Constant)}
    raise ValueError(f"{package}/envs.py has no environment_variables")


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])
