"""What to give vLLM: the JSON of both connectors, as arguments of a shell or of a container."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Sequence
from typing import Any, Literal

from s3kv.config import Config

Role = Literal["both", "producer", "consumer"]
_BINARY = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


Options = dict[str, dict[str, Any] | Literal[True]]
"""True: an option without a value."""
ONE_GROUP: Options = {"--disable-hybrid-kv-cache-manager": True}
"""What an engine needs besides for a model some of whose layers have a window."""


def settings(config: Config) -> dict[str, Any]:
    """What of `config` is not as by default, as it is to be written; bytes with a unit."""
    written = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value != field.default:
            is_bytes = field.metadata["kind"] == "bytes"
            written[field.name] = _with_unit(value) if is_bytes else value
    return written


def connectors(config: Config, role: Role) -> Options:
    """The values of vLLM's options, by their names."""
    extra = settings(config)
    return {
        "--kv-transfer-config": _connector("kv", "S3KVConnector", role, extra),
        "--ec-transfer-config": _connector("ec", "S3ECConnector", role, extra),
    }


def as_arguments(options: Options, comments: Sequence[str]) -> str:
    """One line for each option, quoted for a shell. Comments go before them."""
    lines = [f"# {comment}" for comment in comments]
    for name, value in options.items():
        lines.append(name if value is True else f"{name} {shlex.quote(_compact(value))}")
    return "\n".join(lines)


def as_kubernetes(options: Options, comments: Sequence[str]) -> str:
    """YAML: the `args` of a container whose image runs `vllm serve`."""
    lines = [*(f"# {comment}" for comment in comments), "args:"]
    for name, value in options.items():
        lines.append(f"  - {name}")
        if value is True:
            continue
        # Kubernetes replaces $(NAME) in arguments; $$( is how it writes the bare characters.
        text = _compact(value).replace("$(", "$$(").replace("'", "''")
        lines.append(f"  - '{text}'")
    return "\n".join(lines)


def _connector(kind: str, name: str, role: Role, extra: dict[str, Any]) -> dict[str, Any]:
    return {
        f"{kind}_connector": name,
        f"{kind}_connector_module_path": "s3kv.connectors",
        f"{kind}_role": f"{kind}_{role}",
        f"{kind}_connector_extra_config": extra,
    }


def _compact(value: dict[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"))


def _with_unit(nbytes: int) -> str | int:
    for unit, size in _BINARY:
        if nbytes % size == 0:
            return f"{nbytes // size}{unit}"
    return nbytes
