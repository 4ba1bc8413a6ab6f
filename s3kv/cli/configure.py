"""`s3kv config`: vLLM's options with the JSON of both connectors, quoted for a shell."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import click

from s3kv.cli.invocation import EPILOG, print_json, with_settings
from s3kv.config import Config, is_bytes
from s3kv.types import default_chunk_tokens

Role = Literal["both", "producer", "consumer"]
Options = dict[str, dict[str, Any]]
"""Values of vLLM's options, by option name."""
_BINARY = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
_BLOCK_TOKENS = 16
"""vLLM's default block size."""


@click.command("config", epilog=EPILOG)
@click.option(
    "--role",
    type=click.Choice(["both", "producer", "consumer"]),
    default="both",
    show_default=True,
    help="The instance writes to the bucket (producer), reads from it (consumer), or does both.",
)
@with_settings
def configure(config: Config, as_json: bool, role: Role) -> None:
    """Print the arguments for vLLM: --kv-transfer-config and --ec-transfer-config.

    The first is for every model, the second for multi-modal ones, beside the first or alone. The
    settings are checked as the engine checks them at start. Settings at their default are left out.
    Sends no request.
    """
    options = connectors(config, role)
    if as_json:
        print_json({name.lstrip("-").replace("-", "_"): v for name, v in options.items()})
    else:
        for name, value in options.items():
            click.echo(f"{name} {shlex.quote(compact(value))}")


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
    workers: of one engine; they share the memory. block_tokens: vLLM's --block-size; 0 if it is not
    set. If vLLM has an option for a setting, the option replaces the setting."""
    block_tokens = block_tokens or _BLOCK_TOKENS
    tokens = {"block_size": config.chunk_tokens} if config.chunk_tokens else {}
    vllms_own = ("host_bytes", "chunk_tokens", "share_ranks")
    tier = {name: value for name, value in _settings(config).items() if name not in vllms_own}
    extra = {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": config.host_bytes * workers,
        "offload_prompt_only": False,  # answers as well, as the connector does
        "secondary_tiers": [{"type": "s3kv", **tier}],
        # Blocks by default, not tokens: vLLM may make blocks larger than requested.
        **(tokens or {"blocks_per_chunk": default_chunk_tokens(block_tokens) // block_tokens}),
        **({"canonical_layout": True} if config.share_ranks else {}),
    }
    role = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    return {**role, "kv_connector_extra_config": extra}


def _settings(config: Config) -> dict[str, Any]:
    """The settings that differ from their defaults, as a user writes them: bytes with a unit."""
    written = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value != field.default:
            units = (f"{value // n}{unit}" for unit, n in _BINARY if value % n == 0)
            written[field.name] = next(units, value) if is_bytes(field.name) else value
    return written


def compact(value: Mapping[str, Any]) -> str:
    """JSON without spaces."""
    return json.dumps(value, separators=(",", ":"))
