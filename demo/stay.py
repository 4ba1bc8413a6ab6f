"""`make demo KEEP=1`: the bucket stays for a while, to be looked at with the command line."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lab.constants import split_connector

CONFIG = "demo.json"
METRICS = "{}-metrics.txt"
COMMANDS = ("doctor", "ls --summary", "verify", "gc --max-bytes 64MiB --dry-run")


def write_metrics(directory: Path, name: str, metrics: Mapping[str, float]) -> None:
    """What a server's /metrics would say of s3kv: the samples of `Engine.metrics`."""
    (directory / METRICS.format(name)).write_text(exposition(metrics))


def exposition(metrics: Mapping[str, float]) -> str:
    """The samples of s3kv's metrics, as Prometheus reads them."""
    lines = (
        f"{_quoted(sample)} {value}\n"
        for sample, value in metrics.items()
        if sample.startswith("vllm:s3kv_")
    )
    return "".join(lines)


def write_config(directory: Path, connector: Mapping[str, Any]) -> None:
    """What stands after --kv-transfer-config, as `s3kv --config` takes it."""
    (directory / CONFIG).write_text(json.dumps(split_connector(connector)[0], indent=2) + "\n")


def instructions(directory: Path, env: Mapping[str, str]) -> str:
    """What to paste into another terminal."""
    beside = Path(sys.executable).parent
    exports = dict(env)
    if (beside / "s3kv").exists():
        exports["PATH"] = f"{beside}:$PATH"
    lines = [
        "",
        "The bucket stays until you press Enter here. In another terminal:",
        "",
        f"    cd {shlex.quote(str(directory))}",
        *(f'    export {name}="{value}"' for name, value in exports.items()),
        *(f"    s3kv {command} --config {CONFIG}" for command in COMMANDS),
        f"    s3kv cost --metrics {METRICS.format('first')} --metrics {METRICS.format('second')} "
        "--over 1h --stored 1GiB --gpu-dollars-per-hour 4 --prefill-tokens-per-s 8000",
        "",
    ]
    return "\n".join(lines)


def wait_for_enter() -> None:
    """Until a line, or the end, of stdin."""
    sys.stdin.readline()


def _quoted(sample: str) -> str:
    """`name{a=b,c=d}` as Prometheus writes it."""
    return re.sub(r"=([^,}]*)", r'="\1"', sample)
