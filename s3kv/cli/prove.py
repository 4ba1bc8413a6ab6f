"""`s3kv prove`: proves with an operator's model and bucket that the cache changes no answer."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import signal
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import click
from rich.text import Text

from s3kv.cli import serve, show
from s3kv.cli.doctor.bucket import examine
from s3kv.cli.invocation import FOUND, on_bucket, parse, with_settings
from s3kv.config import Config, count
from s3kv.errors import ConfigError, StoreDenied, StoreError
from s3kv.prove import arms as proof
from s3kv.prove.judge import ArmFacts, judge
from s3kv.prove.page import COLUMNS, cells, html
from s3kv.prove.report import document, margins_text
from s3kv.stores.lanes import in_lanes
from s3kv.stores.store import ObjectInfo, ObjectStore
from s3kv.upkeep.listing import listed, tried

_EPILOG = """\b
EXIT CODES
    0  proven
    1  not proven: an answer changed, or an arm did not serve from its source
    2  it could not be run: vLLM, the model, the bucket or an option is missing or refused;
       or its report cannot be written
  130  interrupted (Ctrl-C)
  141  the reader of the output has closed it (| head)

Credentials are found as every AWS tool finds them."""
_DRAIN_S = 60.0
_LANES = 16
_file = click.Path(dir_okay=False, writable=True, path_type=Path)


@click.command("prove", epilog=_EPILOG, context_settings={"ignore_unknown_options": True})
@click.argument("model")
@click.argument("options", metavar="[OPTIONS OF VLLM]...", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--arms",
    metavar="NAME,...",
    default=",".join(proof.USUAL),
    show_default=True,
    help="Arms to run, of these and tp. off and engine always run.",
)
@serve.connector_option
@click.option(
    "--connector-json",
    metavar="JSON",
    help="A --kv-transfer-config to prove in place of s3kv's, such as LMCache's.",
)
@serve.host_bytes_option
@click.option(
    "--prompts", type=click.IntRange(1), default=8, show_default=True, help="Prompts of each arm."
)
@click.option(
    "--longest",
    type=click.IntRange(1),
    default=4096,
    show_default=True,
    metavar="TOKENS",
    help="Longest prompt; shorter ones where the model takes less.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the prompts.")
@click.option("--html", "html_file", type=_file, help="File for the report as a page.")
@partial(
    with_settings,
    file_option="--settings",
    parsed=dict,
    json_option=click.option("--json", "json_file", type=_file, help="File for it as JSON."),
)
def prove(
    config: dict[str, Any],
    json_file: Path | None,
    html_file: Path | None,
    model: str,
    options: tuple[str, ...],
    arms: str,
    connector: str,
    connector_json: str | None,
    prompts: int,
    longest: int,
    seed: int,
) -> None:
    """Prove that serving KV from the bucket changes no answer of MODEL, and measure the gain.

    Serves the same prompts in several arms: computed, from the engine's own prefix cache, from host
    memory, from the bucket after a restart, and with the bucket away. Compares tokens, logprobs and
    the codes that are planted in the prompts. Each arm starts an engine with the OPTIONS OF
    VLLM. Objects are under PREFIX/prove/ID, and are deleted at the end.
    """
    for option, file in (("--json", json_file), ("--html", html_file)):
        if file is not None and not file.absolute().parent.is_dir():
            raise ConfigError(f"{option} is {str(file)!r}: its folder does not exist")
    serve.server_of(model)
    given, names = serve.given_options(options), _names(arms)
    serve.refuse_connectors(given)
    if connector_json is not None:
        transfer = _given_connector(connector_json)
    else:
        transfer = _own_connector(config, model, given, connector, shares="tp" in names)
    held, skipped = proof.settings_of(transfer), list[str]()
    own = None
    if held is None:
        skipped = ["away did not run: it needs s3kv's settings"]
        names.discard("away")
    else:
        own = parse({**held, "prefix": f"{held.get('prefix', 's3kv')}/prove/{uuid4().hex}"})
        _examine(own)
        changes = {"prefix": own.prefix, "drain_timeout_s": _DRAIN_S}
        if own.disk_path is not None:
            skipped.append("disk_path was left out: files of earlier runs would be served")
            changes |= {"disk_path": None, "disk_bytes": 0}
        transfer = proof.with_settings(transfer, **changes)
    logs = Path(tempfile.mkdtemp(prefix="s3kv-prove-"))
    click.echo(f"s3kv: the engines' logs are in {logs}, until all is proven", err=True)
    argv = [f"--model={model}", *options]
    size = 2 if given.get("--tensor-parallel-size", "1") == "1" else 1
    with _cleaned(own):
        plan = proof.RunInputs(argv, transfer, size, logs, longest, prompts, seed)
        facts = _measure(names, plan)
    judgement = judge(facts, own.max_wait_ms / 1e3 if own else 0.0, empty=own is not None)
    report = document(facts, judgement, model=model, seed=seed, skipped=skipped)
    _present(report, json_file, html_file)
    if not judgement.proven:
        raise SystemExit(FOUND)
    shutil.rmtree(logs)


def _names(arms: str) -> set[str]:
    """The arms to run. Raises `ConfigError`."""
    names = {name.strip() for name in arms.split(",")}
    if unknown := names - proof.ARMS.keys():
        told = f"--arms has {', '.join(sorted(unknown))}: allowed are {', '.join(proof.ARMS)}"
        raise ConfigError(told)
    reads = names - {"off", "engine", "away"}
    return names | set(proof.NEEDED if reads else proof.NEEDED[:2])


def _given_connector(text: str) -> dict[str, Any]:
    try:
        held = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--connector-json is not JSON: {error}") from error
    if not isinstance(held, dict) or "kv_connector" not in held:
        raise ConfigError("--connector-json has no kv_connector: allowed is a kv_transfer_config")
    return held


def _own_connector(
    config: dict[str, Any], model: str, given: Mapping[str, str], connector: str, *, shares: bool
) -> dict[str, Any]:
    """The kv_transfer_config that `s3kv serve` would set. shares: with `share_ranks`."""
    settings = parse(config | ({"share_ranks": True} if shares else {}))
    offloads = serve.offloads_with(connector, given, serve.read_model_config(model, given))
    if "host_bytes" not in config:
        settings, note = serve.with_host_memory(settings, given, offloads=offloads)
        click.echo(f"s3kv: {note}", err=True)
    elif offloads:
        serve.check_shm(settings.host_bytes, math.prod(serve.sizes(given)), "host_bytes is")
    return serve.kv_transfer_config(settings, given, offloads=offloads)


def _examine(config: Config) -> None:
    """Raise `ConfigError`, with remedies, if the bucket cannot be used."""
    findings = examine(config, "probe", bandwidth_bytes=0)
    if faults := [f"{f.check}: {f.detail} → {f.remedy}" for f in findings if f.status == "fault"]:
        raise ConfigError("the bucket cannot be used: " + "; ".join(faults))


def _measure(names: set[str], plan: proof.RunInputs) -> dict[str, ArmFacts]:
    """Measure the facts of all arms, with progress on stderr."""
    with show.bars() as on_progress:

        def report(arm: str, done: int, total: int) -> None:
            on_progress(arm, done, total)
            if not done:
                click.echo(f"s3kv: arm {arm} starts an engine", err=True)

        return dict(proof.run_arms(sorted(names), plan, report))


@contextlib.contextmanager
def _cleaned(config: Config | None) -> Iterator[None]:
    """Delete every object under the prefix at the end, also after an error or SIGTERM."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        if config is not None:
            _clean(config)
        for number, handler in before.items():
            signal.signal(number, handler)


def _clean(config: Config) -> None:
    """Delete every object under the prefix. A failure does not change the exit code."""
    prefix = f"{config.prefix}/"
    try:
        on_bucket(config, partial(_delete, prefix=prefix))
    except StoreError as error:
        click.echo(f"s3kv: objects stay under {prefix}: {error}", err=True)


async def _delete(store: ObjectStore, prefix: str) -> None:
    """Delete all objects under the prefix, with their versions."""
    left = list[str]()

    async def erase(lane: int, info: ObjectInfo) -> None:
        if not await tried(lambda: store.erase(info.key)):
            left.append(info.key)

    await in_lanes(_LANES, listed(store, prefix), erase)
    if left:
        raise StoreDenied(f"versions of {count(len(left), 'object')} stay under {prefix}")


def _present(report: Mapping[str, Any], json_file: Path | None, html_file: Path | None) -> None:
    """Write the files first, in case the terminal's pipe is closed, and print the page. Raises
    `ConfigError` at the end if a file cannot be written."""
    finite = json.loads(json.dumps(report), parse_constant=lambda name: None)
    texts = ((json_file, json.dumps(finite, indent=2) + "\n"), (html_file, html(report)))
    unwritten = []
    for file, text in texts:
        try:
            if file is not None:
                file.write_text(text, "utf-8")
        except OSError as error:
            unwritten.append(f"the report cannot be written: {error}")
    style = "bold green" if report["proven"] else "bold red"
    show.print_grid([[Text(report["verdict"], style)], [margins_text(report)]])
    arms = ((name, row) for name, row in report["arms"].items())
    show.print_table([COLUMNS[0], *show.numbers(*COLUMNS[1:])], (cells(*arm) for arm in arms))
    rows = [(one["arm"], one["text"]) for one in report["findings"]]
    show.print_grid([*rows, *(("", text) for text in report["skipped"])])
    if unwritten:
        raise ConfigError("; ".join(unwritten))
