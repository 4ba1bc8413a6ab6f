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
DERIVED, NOT_CACHED = "derived", "not cached"
KINDS = (FINGERPRINT, BLOCK_HASH, REFUSED, NO, DERIVED, NOT_CACHED)
FILES = {
    "requests": {
        "v1/engine/__init__.py": "EngineCoreRequest",
        "multimodal/inputs.py": "MultiModalFeatureSpec PlaceholderRange",
        "lora/request.py": "LoRARequest",
        "sampling_params.py": "SamplingParams",
        "pooling_params.py": "PoolingParams",
        "v1/request.py": "Request StreamingUpdate",
        "v1/core/sched/output.py": "SchedulerOutput NewRequestData CachedRequestData",
        "v1/worker/gpu_input_batch.py": "CachedRequestState InputBatch",
        "v1/worker/gpu/states.py": "gpu.RequestState",
        "v1/worker/gpu/input_batch.py": "gpu.InputBatch gpu.InputBuffers",
    },
    "cache": {
        "v1/kv_cache_interface.py": "KVCacheSpec AttentionSpec FullAttentionSpec MLAAttentionSpec "
        "MambaSpec KVCacheTensor KVCacheGroupSpec KVCacheConfig",
        "v1/kv_offload/config.py": "OffloadingConfig OffloadingGroupConfig OffloadingModelConfig "
        "OffloadingCacheConfig OffloadingParallelConfig",
    },
}
"""By table: vLLM's files, and every class in them that carries what a model is given of a request,
or that says what is in a block, a page or a row."""


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
    if kind not in KINDS or not why:
        raise ValueError(f"{group}: {names!r} has where={where!r}, why={why!r}")
    for name in names.split():
        plain, _, versions = name.partition("@")
        first, _, last = versions.partition("-")
        yield Row(group, plain, kind, at, why, first, last)


def wrong(package: Path, version: str) -> list[str]:
    """What the tables say of one version of vLLM and its sources do not, and the other way round.
    package: the directory that has vLLM's `config` and `envs.py`."""
    there = {f"config.toml: {name}" for name in config_fields(package)}
    there |= {f"{name}.toml: {field}" for name in FILES for field in fields_of(package, name)}
    there |= {f"environment.toml: {name}" for name in environment_variables(package)}
    told = [
        f"{name}.toml: {row.group}.{row.name}"
        for name in ("config", *FILES)
        for row in table(name)
        if row.in_version(version)
    ]
    told += [f"environment.toml: {r.name}" for r in table("environment") if r.in_version(version)]
    found = [f"{name} has no row" for name in sorted(there - set(told))]
    found += [f"{name} is not in vLLM {version}" for name in sorted(set(told) - there)]
    return found + [f"{name} has two rows" for name in sorted(set(told)) if told.count(name) > 1]


def config_fields(package: Path) -> set[str]:
    """`Class.field` of every annotated field of every class in vLLM's configuration."""
    return {
        f"{node.name}.{field}"
        for file in (package / "config").glob("*.py")
        for node in _classes(file)
        for field in _annotated(node)
    }


def fields_of(package: Path, name: str) -> set[str]:
    """`Class.field` of every field, annotated or set at first, of the classes of a table."""
    return {
        f"{group}.{field}"
        for file, groups in FILES[name].items()
        for group in groups.split()
        for node in _classes(package / file)
        if node.name == group.removeprefix("gpu.")
        for field in _annotated(node) | _set_at_first(node)
    }


def _classes(file: Path) -> list[ast.ClassDef]:
    """The classes of a file; none if there is no such file."""
    body = ast.parse(file.read_text()).body if file.exists() else []
    return [node for node in body if isinstance(node, ast.ClassDef)]


def _annotated(node: ast.ClassDef) -> set[str]:
    return {
        statement.target.id
        for statement in node.body
        if isinstance(statement, ast.AnnAssign)
        and isinstance(statement.target, ast.Name)
        and "ClassVar" not in ast.dump(statement.annotation)
    }


def _set_at_first(node: ast.ClassDef) -> set[str]:
    """The attributes of `self` that `__init__` sets."""
    return {
        place.attr
        for method in node.body
        if isinstance(method, ast.FunctionDef) and method.name == "__init__"
        for place in ast.walk(method)
        if isinstance(place, ast.Attribute)
        and isinstance(place.ctx, ast.Store)
        and isinstance(place.value, ast.Name)
        and place.value.id == "self"
    }


def environment_variables(package: Path) -> set[str]:
    """The keys of vLLM's own table of the variables it reads."""
    for node in ast.parse((package / "envs.py").read_text()).body:
        target = getattr(node, "target", None)
        if isinstance(target, ast.Name) and target.id == "environment_variables":
            return {key.value for key in node.value.keys if isinstance(key, ast.Constant)}
    raise ValueError(f"{package}/envs.py has no environment_variables")


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])
