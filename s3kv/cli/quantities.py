"""Times and sizes as options take them: each function is the `type` of a click option.

Raises `click.BadParameter`. What a function is called is what the help calls the value.
"""

from __future__ import annotations

import re

import click

from s3kv.fields import parse_bytes

_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0}


def duration(text: str) -> float:
    """A time such as 90m, 24h or 7d; in seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if match is None or float(match[1]) == 0:
        raise click.BadParameter(f"{text!r} is no time such as 90m, 24h or 7d")
    return float(match[1]) * _UNITS_S[match[2]]


def size(text: str) -> int:
    """A size such as 500GiB, 1.5TiB or 4096; in bytes."""
    nbytes = parse_bytes(text)
    if nbytes is None:
        raise click.BadParameter(f"{text!r} is no size such as 500GiB or 1.5TiB")
    return nbytes
