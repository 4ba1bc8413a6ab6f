"""What a setting is, and how a value for one is read and refused.

`Config` is made of fields from `setting`; messages and documentation describe them by `allowed`.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from s3kv.errors import ConfigError

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12} | {
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_BYTES = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?b)?\s*$", re.IGNORECASE)


def setting(
    default: Any = dataclasses.MISSING,
    *,
    doc: str,
    kind: str,
    choices: tuple[str, ...] = (),
    minimum: float | None = None,
    maximum: float | None = None,
) -> Any:
    """A field of `Config`. `kind` is one of text, flag, count, number, bytes."""
    meta = {"doc": doc, "kind": kind, "choices": choices, "minimum": minimum, "maximum": maximum}
    if default is dataclasses.MISSING:
        return dataclasses.field(metadata=meta)
    return dataclasses.field(default=default, metadata=meta)


def parse_bytes(text: str) -> int | None:
    """A number of bytes with or without a unit ("4GiB", "500MB", "4096"); None for other text."""
    match = _BYTES.match(text)
    return None if match is None else int(float(match[1]) * _UNITS[(match[2] or "").lower()])


def convert(field: dataclasses.Field[Any], value: Any) -> Any:
    """The value of a setting as `Config` holds it. Raises `ConfigError` for bytes not readable."""
    kind = field.metadata["kind"]
    if kind == "bytes" and isinstance(value, str):
        nbytes = parse_bytes(value)
        if nbytes is None:
            raise ConfigError(wrong(field, value))
        return nbytes
    if kind == "number" and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return value


_PYTHON_TYPES: dict[str, type] = {
    "text": str,
    "flag": bool,
    "count": int,
    "number": float,
    "bytes": int,
}


def check(field: dataclasses.Field[Any], value: Any) -> None:
    """Raises `ConfigError` when the setting must not be `value`."""
    meta = field.metadata
    if value is None and field.default is None:
        return
    right_type = isinstance(value, _PYTHON_TYPES[meta["kind"]])
    if isinstance(value, bool) and meta["kind"] != "flag":
        right_type = False
    in_range = right_type and not (
        (meta["choices"] and value not in meta["choices"])
        or (meta["minimum"] is not None and not value >= meta["minimum"])
        or (meta["maximum"] is not None and not value <= meta["maximum"])
    )
    if not in_range:
        raise ConfigError(wrong(field, value))


def allowed(field: dataclasses.Field[Any]) -> str:
    """In words, what a setting may be; for error messages and the documentation."""
    meta = field.metadata
    if meta["choices"]:
        return " or ".join(repr(c) for c in meta["choices"])
    words = {
        "text": "text",
        "flag": "true or false",
        "count": "a whole number",
        "number": "a number",
        "bytes": "a number of bytes, or text with a unit such as '4GiB'",
    }[meta["kind"]]
    if meta["minimum"] is not None:
        words += f", {meta['minimum']:,} or more"
    if meta["maximum"] is not None:
        words += f", at most {meta['maximum']:,}"
    return words


def wrong(field: dataclasses.Field[Any], value: Any) -> str:
    """The message that refuses a value."""
    return f"{field.name} is {value!r}: allowed is {allowed(field)}"
