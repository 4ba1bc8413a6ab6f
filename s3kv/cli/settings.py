"""Which bucket, and how: the settings as the command line takes them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from s3kv.config import Config
from s3kv.errors import ConfigError

_NESTED = ("kv_connector_extra_config", "ec_connector_extra_config")


def read_settings(
    file: Path | None, named: Mapping[str, str | None], assignments: Sequence[str]
) -> Config:
    """Settings of a file, then options, then assignments; what comes later wins.

    file: JSON, either the settings or what stands after `--kv-transfer-config`.
    named: settings with options of their own; None where the option was not given.
    assignments: "name=value"; a value that is JSON is taken as such, any other as text.
    Raises `ConfigError`.
    """
    raw: dict[str, Any] = {} if file is None else _read_file(file)
    raw |= {name: value for name, value in named.items() if value is not None}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals:
            raise ConfigError(f"--set {assignment!r}: it is to be NAME=VALUE")
        raw[name] = _value(value)
    return Config.parse(raw, source="the command line or its --config file")


def _read_file(file: Path) -> dict[str, Any]:
    try:
        held = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--config {str(file)!r} cannot be read as JSON: {error}") from error
    if not isinstance(held, dict):
        raise ConfigError(f"--config {str(file)!r} is no JSON object")
    nested = next((held[name] for name in _NESTED if isinstance(held.get(name), dict)), held)
    return dict(nested)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
