"""Times and sizes as options take them."""

from __future__ import annotations

import re
from typing import Any

import click

from s3kv.fields import parse_bytes

_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0}


class Duration(click.ParamType[float]):
    """A time such as 90m, 24h or 7d; in seconds."""

    name = "duration"

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", str(value))
        if match is None or float(match[1]) == 0:
            self.fail(f"{value!r} is no time such as 90m, 24h or 7d", param, ctx)
        return float(match[1]) * _UNITS_S[match[2]]


class Bytes(click.ParamType[int]):
    """A size such as 500GiB, 1.5TiB or 4096; in bytes."""

    name = "bytes"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        nbytes = parse_bytes(str(value))
        if nbytes is None:
            self.fail(f"{value!r} is no size such as 500GiB or 1.5TiB", param, ctx)
        return nbytes
