"""Parts shared by all commands: options, their types, exit codes, the store, JSON."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import math
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

import click

from s3kv.config import Config, parse_bytes
from s3kv.errors import ConfigError, S3KVError, StoreError
from s3kv.stores.s3.s3_store import open_store
from s3kv.stores.store import ObjectStore

FOUND, WRONG_USE, NOT_ASKED = 1, 2, 3
EXIT_CODES = """\b
EXIT CODES
    0  success
    1  something was found: a fault, an object damaged or not judged, no such object
    2  the command was used wrongly, or a setting is wrong
    3  the bucket, or the server named, could not be used, or disk or memory is full
  130  interrupted (Ctrl-C)
  141  the reader of the output has closed it (| head)"""
EPILOG = f"""{EXIT_CODES}

Credentials are found as every AWS tool finds them."""
_TIER_OPTIONS = ("type", "module_path", "locality", "backpressure", "cpu_bytes_to_use")
"""Options of a tier that belong to vLLM, and the memory size of the connector around it."""
_NAMED = ("bucket", "prefix", "region", "endpoint_url", "host_bytes")
"""Settings that have options of their own."""
_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0}
_T = TypeVar("_T")

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
existing_file = click.Path(exists=True, dir_okay=False, path_type=Path)


def parse(settings: Mapping[str, Any]) -> Config:
    """The settings of a command line, or of a tier. Raises `ConfigError`."""
    vllms_own = _TIER_OPTIONS if settings.get("type") == "s3kv" else ()
    ours = {name: value for name, value in settings.items() if name not in vllms_own}
    return Config.parse(ours, source="the command line or its file of settings")


def with_tier_bytes(settings: Mapping[str, Any]) -> tuple[Config, int | None]:
    """The settings, and a tier's `cpu_bytes_to_use`: None without a tier, 0 if it is missing."""
    given = settings.get("cpu_bytes_to_use", 0) if settings.get("type") == "s3kv" else None
    return parse(settings), given if isinstance(given, int | None) else 0


def with_settings(
    command: Callable[..., None],
    file_option: str = "--config",
    parsed: Callable[[dict[str, Any]], Any] = parse,
    json_option: Callable[[Callable[..., None]], Callable[..., None]] = json_option,
) -> Callable[..., None]:
    """Decorate a command: adds the options that name the bucket and `--json`, passes the `parsed`
    settings as `config`, and turns our errors into exit codes."""

    @click.option("--bucket", help="Name of the bucket.")
    @click.option("--prefix", help="All keys start with this.  [default: s3kv]")
    @click.option("--region", help="AWS region; by default that of AWS's own settings.")
    @click.option("--endpoint-url", help="URL of an S3-compatible server.")
    @click.option(
        file_option,
        "file",
        type=existing_file,
        help="JSON file: the value of --kv-transfer-config, or the settings alone.",
    )
    @click.option("--set", "assign", multiple=True, metavar="NAME=VALUE", help="Any other setting.")
    @json_option
    @functools.wraps(command)
    def wrapped(*, file: Path | None, assign: tuple[str, ...], **options: Any) -> None:
        named = {name: options.pop(name) for name in _NAMED if name in options}
        with reporting_errors():
            settings = read_settings(file, named, assign)
            if options.get("disk") is not None:
                settings.setdefault("bucket", "not-asked")
            command(config=parsed(settings), **options)

    return wrapped


def read_settings(
    file: Path | None, named: Mapping[str, str | None], assignments: Sequence[str]
) -> dict[str, Any]:
    """The settings of a file, then of options, then of assignments; later ones win.

    file: JSON, the settings or the value of `--kv-transfer-config` with our connector or tier.
    named: settings with options of their own; None for an option that was not given.
    assignments: "name=value"; a value that is valid JSON is parsed, any other is text.
    Raises `ConfigError`.
    """
    raw: dict[str, Any] = {} if file is None else _read_file(file)
    raw |= {name: value for name, value in named.items() if value is not None}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals:
            raise ConfigError(f"--set is {assignment!r}: allowed is NAME=VALUE")
        try:
            raw[name] = json.loads(value)
        except ValueError:
            raw[name] = value
    return raw


def _read_file(file: Path) -> dict[str, Any]:
    try:
        held = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{str(file)!r} cannot be read as JSON: {error}") from error
    if not isinstance(held, dict):
        raise ConfigError(f"{str(file)!r} is not a JSON object")
    from s3kv.prove.arms import extra_of, settings_of  # most commands have no such file

    around: dict[str, Any] = {}
    settings = settings_of(held, around) or extra_of(held)
    return settings | {name: around[name] for name in ("cpu_bytes_to_use",) if name in around}


def duration(text: str) -> float:
    """Option type: a time such as 90m, 24h or 7d, in seconds. Raises `click.BadParameter`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if match is None or float(match[1]) == 0:
        raise click.BadParameter(f"{text!r} is not a time such as 90m, 24h or 7d")
    return float(match[1]) * _UNITS_S[match[2]]


def size(text: str) -> int:
    """Option type: a size such as 500GiB or 4096, in bytes. Raises `click.BadParameter`."""
    if (nbytes := parse_bytes(text)) is None:
        raise click.BadParameter(f"{text!r} is not a size such as 500GiB or 1.5TiB")
    return nbytes


class FiniteRange(click.FloatRange):
    """Option type: a number within bounds that is neither infinite nor NaN."""

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return number


@contextlib.contextmanager
def reporting_errors() -> Iterator[None]:
    """Turn our errors into one line on stderr and an exit code."""
    try:
        yield
    except S3KVError as error:
        click.echo(f"s3kv: {error}", err=True)
        raise SystemExit(NOT_ASKED if isinstance(error, StoreError) else WRONG_USE) from error


def on_bucket(config: Config, work: Callable[[ObjectStore], Awaitable[_T]]) -> _T:
    """Run `work` on the bucket, with a client that is closed afterwards.

    Raises `StoreError`, and `ConfigError` if the configured client cannot serve the bucket.
    """

    async def run() -> _T:
        store = open_store(config)
        try:
            return await work(store)
        finally:
            await store.close()

    return asyncio.run(run())


def now_s() -> float:
    """Wall time in seconds since 1970, against which the ages of objects are measured."""
    return datetime.now(timezone.utc).timestamp()


def print_json(document: Any, *, indent: int | None = 2) -> None:
    """Print a JSON document for `--json`; on one line with `indent=None`."""
    click.echo(json.dumps(document, indent=indent, allow_nan=False))
