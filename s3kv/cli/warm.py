"""`s3kv warm`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from s3kv.cli.invocation import EXIT_CODES, FOUND, print_json, reporting_errors
from s3kv.cli.progress import bars
from s3kv.cli.prompts import Warmed, choose_model, read_prompts, send
from s3kv.cli.server import Server

_SHOWN = 10


@click.command(epilog=EXIT_CODES)
@click.argument("prompts", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--url", default="http://localhost:8000", show_default=True, help="The vLLM server, with s3kv."
)
@click.option("--model", help="Under which name it serves; needed when there are several.")
@click.option(
    "--at-once", type=click.IntRange(1), default=4, show_default=True, help="Requests at a time."
)
@click.option(
    "--api-key", envvar="VLLM_API_KEY", show_envvar=True, help="As for `vllm serve --api-key`."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def warm(
    prompts: Path, url: str, model: str | None, at_once: int, api_key: str | None, as_json: bool
) -> None:
    """Send the prompts of a file through a running server, so that the bucket holds them.

    PROMPTS has one on each line; in a file *.jsonl a line is a text, a list of token ids, or an
    object with "prompt" or "messages" and whatever else the request is to have. Each is asked once,
    for one token: what the bucket has is fetched, the rest is computed and saved in the background.
    What is shorter than a chunk (chunk_tokens) is not saved. One that fails is named and not tried
    again; the others go on.
    """
    with reporting_errors():
        asked = read_prompts(prompts)
        server = Server(url, api_key)
        name = choose_model(server, model)
        with bars() as on_progress:
            warmed = send(
                server,
                name,
                asked,
                at_once=at_once,
                on_answer=lambda done: on_progress("warming", done, len(asked)),
            )
    if as_json:
        failed = [{"line": line, "reason": reason} for line, reason in warmed.failed]
        print_json({"model": name} | asdict(warmed) | {"failed": failed})
    else:
        _show(warmed, name)
    raise SystemExit(FOUND if warmed.failed else 0)


def _show(warmed: Warmed, model: str) -> None:
    click.echo(f"{warmed.sent:,} prompts, {warmed.prompt_tokens:,} tokens, through {model}")
    if warmed.cached_tokens is None:
        click.echo(
            "How many were there already the server does not say: start it with "
            "--enable-prompt-tokens-details"
        )
    else:
        computed = warmed.prompt_tokens - warmed.cached_tokens
        click.echo(f"{warmed.cached_tokens:,} were there already, {computed:,} were computed")
    for line, reason in warmed.failed[:_SHOWN]:
        click.echo(f"s3kv: line {line}: {reason}", err=True)
    if len(warmed.failed) > _SHOWN:
        click.echo(f"s3kv: and {len(warmed.failed) - _SHOWN} more", err=True)
