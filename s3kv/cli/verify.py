"""`s3kv verify`."""

from __future__ import annotations

import random
from dataclasses import asdict

import click
from rich.console import Console
from rich.text import Text

from s3kv.cli import show
from s3kv.cli.invocation import EPILOG, FOUND, on_bucket, print_json, with_settings
from s3kv.cli.patience import chunks
from s3kv.cli.progress import bars
from s3kv.cli.verification import Verification, Verifier, in_turn, sample
from s3kv.config import Config
from s3kv.objects.s3 import S3Store


@click.command(epilog=EPILOG)
@click.option("--sample", "count", type=click.IntRange(min=1), help="Read so many, by chance.")
@click.option("--seed", type=int, default=0, show_default=True, help="Which ones, with --sample.")
@click.option("--delete", is_flag=True, help="Delete what is damaged.")
@with_settings
def verify(config: Config, count: int | None, seed: int, delete: bool, as_json: bool) -> None:
    """Read objects back, and list those that are not what their keys say.

    Reads all of them, or a --sample, and verifies each as `inspect` does; what does not verify is
    read twice. Namespaces whose integrity is not what the settings say (--set integrity=…, and the
    secret) are named and left alone. To an engine a damaged object is a miss; with --delete it is
    saved anew the next time it is computed. Reading is paid for by request, and by byte where the
    bucket is in another region.
    """

    async def run(store: S3Store) -> Verification:
        if count is None:
            picks, total = chunks(store, config.prefix), None
        else:
            picked = await sample(store, config.prefix, count, random.Random(seed))
            picks, total = in_turn(picked), len(picked)
        with bars() as on_progress:
            verifier = Verifier(
                store,
                config,
                delete=delete,
                on_object=lambda checked: on_progress("verifying", checked, total),
            )
            await verifier.run(picks)
        return verifier.found

    found = on_bucket(config, run)
    if as_json:
        print_json(asdict(found))
    else:
        _print(found)
    raise SystemExit(0 if found.is_clean else FOUND)


def _print(found: Verification) -> None:
    console = Console(soft_wrap=True)
    for damage in found.damaged:
        what = Text(f"{damage.refusal:<10}", "bold red")
        console.print(what.append(f"  {damage.key}{'  (deleted)' if damage.deleted else ''}", ""))
    for digest, objects in found.unjudged.items():
        told = f"namespace {digest}: {objects:,} objects cannot be judged with these settings"
        console.print(Text(told, "yellow"))
        console.print("→ give --set integrity=… as its engines have it, and their secret")
    told = f"{found.checked:,} objects ({show.size(found.nbytes)}) read, "
    told += f"{len(found.damaged):,} damaged"
    if found.misread:
        told += f", {found.misread:,} right only when read twice"
    if found.gone:
        told += f", {found.gone:,} gone or replaced meanwhile"
    console.print(Text(told))
