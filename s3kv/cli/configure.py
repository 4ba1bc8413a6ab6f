"""`s3kv config`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from s3kv.cli import models, show, transfer
from s3kv.cli.invocation import EPILOG, print_json, with_settings
from s3kv.config import Config


@click.command("config", epilog=EPILOG)
@click.option(
    "--role",
    type=click.Choice(["both", "producer", "consumer"]),
    default="both",
    show_default=True,
    help="What the instance does with the bucket: write (producer), read (consumer), or both.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["shell", "kubernetes"]),
    default="shell",
    show_default=True,
    help="Arguments for a shell, or YAML for a container of Kubernetes.",
)
@click.option(
    "--model-config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The model's config.json: say what host_bytes holds of this model.",
)
@click.option(
    "--kv-cache-dtype",
    type=click.Choice(models.KV_DTYPES),
    default="auto",
    show_default=True,
    help="As the engine's option of that name.",
)
@click.option(
    "--block-size", type=click.IntRange(1), default=16, show_default=True, help="Likewise."
)
@click.option(
    "--tensor-parallel-size", type=click.IntRange(1), default=1, show_default=True, help="Likewise."
)
@click.option(
    "--pipeline-parallel-size",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Likewise.",
)
@with_settings
def configure(
    config: Config,
    as_json: bool,
    role: transfer.Role,
    form: str,
    model_config: Path | None,
    kv_cache_dtype: str,
    block_size: int,
    tensor_parallel_size: int,
    pipeline_parallel_size: int,
) -> None:
    """Print what to give vLLM: --kv-transfer-config, and --ec-transfer-config.

    The first is for every model, the second for multi-modal ones, beside the first or alone. The
    settings are checked as the engine checks them at start. Those that are as by default are left
    out. Asks no bucket.
    """
    options = transfer.connectors(config, role)
    fits: dict[str, Any] | None = None
    comments: list[str] = []
    if model_config is not None:
        parallel = models.Parallelism(tensor_parallel_size, pipeline_parallel_size)
        shape = models.read_shape(model_config, parallel, kv_cache_dtype)
        room = models.fit(config, shape, block_size)
        fits = {
            "bytes_per_token": shape.bytes_per_token,
            **asdict(room),
            "tokens": room.tokens,
            "host_bytes": config.host_bytes,
        }
        comments = _explain(config, shape, room)
        if shape.has_windows:
            options |= transfer.ONE_GROUP
    if as_json:
        named = {name.lstrip("-").replace("-", "_"): value for name, value in options.items()}
        print_json({**named, "host_memory": fits})
        return
    render = transfer.as_kubernetes if form == "kubernetes" else transfer.as_arguments
    click.echo(render(options, comments))


def _explain(config: Config, shape: models.KVShape, room: models.HostFit) -> list[str]:
    said = [
        f"One token is {shape.bytes_per_token:,} bytes of KV per worker: {shape}.",
        f"One chunk is {room.chunk_tokens} tokens, {show.size(room.slot_bytes)}, one object.",
        f"host_bytes, {show.size(config.host_bytes)} per worker, holds {room.chunks:,} chunks: "
        f"{room.tokens:,} tokens.",
    ]
    if shape.has_windows:
        said.append(
            "It has layers with a window, whose KV vLLM has to keep whole. If all of its layers "
            "have one, the engine refuses at start."
        )
    return said
