"""What every command shares: the options that name a bucket, exit codes, the client, JSON."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from collections.abc import Awaitable, Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

import click

from s3kv.cli.server import ServerError
from s3kv.cli.settings import read_settings
from s3kv.config import Config
from s3kv.errors import S3KVError, StoreError
from s3kv.objects.s3 import S3Store

FOUND, WRONG_USE, NOT_ASKED = 1, 2, 3
_T = TypeVar("_T")
EXIT_CODES = """\b
EXIT CODES
  0  all is well
  1  something was found: a fault, a damaged object, no such object
  2  the command was used wrongly, or a setting is wrong
  3  the bucket, or the server named, could not be asked: the message says why"""
EPILOG = f"""{EXIT_CODES}

Credentials are found as every AWS tool finds them."""


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options that name the bucket, `--json`, and our errors as exit codes."""

    @click.option("--bucket", help="Name of the bucket.")
    @click.option("--prefix", help="All keys start with this.  [default: s3kv]")
    @click.option("--region", help="AWS region; otherwise what AWS's own settings say.")
    @click.option("--endpoint-url", help="URL of an S3-compatible server.")
    @click.option(
        "--config",
        "file",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="JSON file: what stands after --kv-transfer-config, or the settings alone.",
    )
    @click.option("--set", "assign", multiple=True, metavar="NAME=VALUE", help="Any other setting.")
    @click.option("--json", "as_json", is_flag=True, help="Print JSON.")
    @functools.wraps(command)
    def wrapped(*, file: Path | None, assign: tuple[str, ...], **options: Any) -> None:
        names = ("bucket", "prefix", "region", "endpoint_url")
        named = {name: options.pop(name) for name in names}
        with reporting_errors():
            command(config=read_settings(file, named, assign), **options)

    return wrapped


@contextlib.contextmanager
def reporting_errors() -> Iterator[None]:
    """Our errors become one line on stderr and an exit code."""
    try:
        yield
    except S3KVError as error:
        click.echo(f"s3kv: {error}", err=True)
        unasked = isinstance(error, StoreError | ServerError)
        raise SystemExit(NOT_ASKED if unasked else WRONG_USE) from error


def on_bucket(config: Config, work: Callable[[S3Store], Awaitable[_T]]) -> _T:
    """Run `work` on the bucket, with a client that is closed afterwards. Raises `StoreError`."""

    async def run() -> _T:
        store = S3Store(config)
        try:
            return await work(store)
        finally:
            await store.close()

    return asyncio.run(run())


def now_s() -> float:
    """Wall time in seconds since 1970: what the ages of objects are measured against."""
    return datetime.now(timezone.utc).timestamp()


def print_json(document: Any) -> None:
    """The one document that `--json` promises."""
    click.echo(json.dumps(document, indent=2, allow_nan=False))
