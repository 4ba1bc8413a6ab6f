"""`s3kv config`: the options for vLLM, the JSON of both connectors, for a shell."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import click

from s3kv.cli import show
from s3kv.cli.invocation import EPILOG, print_json, size_above_0, with_settings
from s3kv.config import Config, count, is_bytes
from s3kv.errors import ConfigError
from s3kv.objects.codec import ALIGN_BYTES
from s3kv.types import default_chunk_tokens

Role = Literal["both", "producer", "consumer"]
Options = dict[str, dict[str, Any]]
"""Values of vLLM's options, by their names."""
_BINARY = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
_BLOCK_TOKENS = 16
"""vLLM's default block size, from which `chunk_tokens` follows if it is not set."""


@click.command("config", epilog=EPILOG)
@click.option(
    "--role",
    type=click.Choice(["both", "producer", "consumer"]),
    default="both",
    show_default=True,
    help="The instance writes to the bucket (producer), reads from it (consumer), or does both.",
)
@click.option(
    "--bytes-per-token",
    type=size_above_0,
    metavar="SIZE",
    help="KV bytes of a token on one worker, to print how many tokens host_bytes holds.",
)
@with_settings
def configure(config: Config, as_json: bool, role: Role, bytes_per_token: int | None) -> None:
    """Print the arguments for vLLM: --kv-transfer-config and --ec-transfer-config.

    The first is for every model, the second for multi-modal ones, beside the first or alone. The
    settings are checked as the engine checks them at start. Settings at their default are left out.
    Sends no request.
    """
    options = connectors(config, role)
    held = None if bytes_per_token is None else host_memory(config, bytes_per_token)
    if as_json:
        named = {name.lstrip("-").replace("-", "_"): value for name, value in options.items()}
        print_json(named | {"host_memory": held})
        return
    click.echo(as_arguments(options, [] if held is None else _explain(held)))


def connectors(config: Config, role: Role, kinds: Sequence[str] = ("kv", "ec")) -> Options:
    """The options of our connectors of these kinds."""
    extra = _settings(config)
    return {
        f"--{kind}-transfer-config": {
            f"{kind}_connector": f"S3{kind.upper()}Connector",
            f"{kind}_connector_module_path": "s3kv.connectors",
            f"{kind}_role": f"{kind}_{role}",
            f"{kind}_connector_extra_config": extra,
        }
        for kind in kinds
    }


def offloading_connector(config: Config, workers: int, block_tokens: int = 0) -> dict[str, Any]:
    """The value of --kv-transfer-config for vLLM's own connector, with s3kv as its tier.

    workers: of one engine, which share the memory. block_tokens: vLLM's --block-size; 0 if it is
    not set. Where vLLM has an option for what a setting means, it takes the place of the setting.
    """
    block_tokens = block_tokens or _BLOCK_TOKENS
    tokens = {"block_size": config.chunk_tokens} if config.chunk_tokens else {}
    vllms_own = ("host_bytes", "chunk_tokens", "share_ranks")
    tier = {name: value for name, value in _settings(config).items() if name not in vllms_own}
    extra = {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": config.host_bytes * workers,
        "offload_prompt_only": False,  # answers, too, as the connector does
        "secondary_tiers": [{"type": "s3kv", **tier}],
        # Blocks by default, and not tokens: vLLM may make blocks larger than it is asked to.
        **(tokens or {"blocks_per_chunk": default_chunk_tokens(block_tokens) // block_tokens}),
        **({"canonical_layout": True} if config.share_ranks else {}),
    }
    role = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    return {**role, "kv_connector_extra_config": extra}


def as_arguments(options: Options, comments: Sequence[str]) -> str:
    """One line for each option, quoted for a shell. Comments go before them."""
    lines = [f"# {comment}" for comment in comments]
    lines += [f"{name} {shlex.quote(compact(value))}" for name, value in options.items()]
    return "\n".join(lines)


def chunk_tokens(config: Config) -> int:
    """Tokens in a chunk: the setting, or what an engine with vLLM's block size takes."""
    return config.chunk_tokens or default_chunk_tokens(_BLOCK_TOKENS)


def host_memory(config: Config, bytes_per_token: int) -> dict[str, int]:
    """The chunks that one worker's host memory holds, about: the header of an object is taken to be
    as short as it can be. Raises `ConfigError` if it holds none."""
    tokens = chunk_tokens(config)
    chunk_bytes = tokens * bytes_per_token
    chunks = config.host_bytes // (chunk_bytes + ALIGN_BYTES)
    if chunks < 1:
        raise ConfigError(
            f"host_bytes is {config.host_bytes}: allowed is at least one chunk, which is "
            f"{chunk_bytes} bytes of KV and a header (or make chunk_tokens smaller)"
        )
    return {
        "bytes_per_token": bytes_per_token,
        "chunk_tokens": tokens,
        "chunk_bytes": chunk_bytes,
        "chunks": chunks,
        "tokens": chunks * tokens,
        "host_bytes": config.host_bytes,
    }


def _explain(held: Mapping[str, int]) -> list[str]:
    chunk, host = show.size(held["chunk_bytes"]), show.size(held["host_bytes"])
    return [
        f"One chunk is {count(held['chunk_tokens'], 'token')}, {chunk}, one object.",
        f"host_bytes, {host} per worker, holds about {count(held['chunks'], 'chunk')}: "
        f"{count(held['tokens'], 'token')}.",
    ]


def _settings(config: Config) -> dict[str, Any]:
    """The settings that differ from their defaults, as a user writes them: bytes with a unit."""
    written = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value != field.default:
            written[field.name] = _with_unit(value) if is_bytes(field.name) else value
    return written


def compact(value: Mapping[str, Any]) -> str:
    """JSON without spaces."""
    return json.dumps(value, separators=(",", ":"))


def _with_unit(nbytes: int) -> str | int:
    for unit, unit_bytes in _BINARY:
        if nbytes % unit_bytes == 0:
            return f"{nbytes // unit_bytes}{unit}"
    return nbytes
