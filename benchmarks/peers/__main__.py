"""s3kv beside other connectors, on one machine, in one run: `python -m benchmarks.peers`.

Two models: `random` with 64 KiB of KV per token and prompts of 1,600 tokens, `smollm` with 22.5 KiB
and prose, 1,088 tokens. Sixteen prompts each. Every round starts, in turn,

    none     an engine without a connector: a cold pass, then the same prompts again, which hit the
             engine's own prefix cache (`local`)

and for each connector, in another order every round,

    cold     an engine with nothing to find: computes, saves; one request after another
    warm     a new engine, which finds what `cold` has left behind: requests of one user, requests
             for one token each, and those of four users at once
    warm     once more a new engine: sixteen users at once

    s3kv             this project
    s3kv-compressed  this project, with compressed objects
    s3kv-disk        this project, with files in a temporary folder before the bucket
    offloading-s3kv  vLLM's OffloadingConnector, tier `s3kv`: this project's
    offloading-obj   vLLM's OffloadingConnector, tier `obj`: NIXL's S3 plugin   --nixl-python
    offloading-fs    vLLM's OffloadingConnector, tier `fs`: files in a temporary folder, no S3
    lmcache          LMCacheMPConnector and an LMCache server, S3 adapter       --lmcache-python

A time counts only if the work was done: every pass has to give the tokens of the engine without a
connector, a cold pass has to hit nothing and to leave every chunk behind, a warm one of one user
has to hit what `local` hits, all of it in the connector by the engine's own count. A pass that
fails is told with what is wrong, and without a time. The result begins with the figures in which
another connector is better.

How to give the other connectors environments of their own, and what stands in for a GPU:
docs/peers-benchmark.md. Whoever gets none is left out, and the result says so.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.deadline import begin, command_line, ends, say
from benchmarks.floor import Server
from benchmarks.origin import ROOT
from benchmarks.peers import contenders, defeats
from benchmarks.peers.bench import Bench, Make
from benchmarks.peers.work import SIZES, USERS, Work, work
from benchmarks.rig import SMALL, Store, add_server, machine, publish, s3
from lab.engine import Engine
from lab.zygote import Zygotes

VERSIONS = """
import sys
from importlib import import_module
from importlib.metadata import packages_distributions, version
distributions = packages_distributions()
for module in sys.argv[1:]:
    found = distributions.get(module)
    print(version(found[0]) if found else import_module(module).__version__)
"""
NAMES = (
    *("s3kv", "s3kv-compressed", "s3kv-disk", "offloading-s3kv"),
    *("offloading-obj", "offloading-fs", "lmcache"),
)


def _versions(python: str, *modules: str) -> dict[str, str]:
    command = [python, "-c", VERSIONS, *modules]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return dict(zip(modules, done.stdout.split(), strict=True))


def _entered(
    options: argparse.Namespace, folder: Path, store: Store
) -> tuple[list[Make], dict[str, str], dict[str, str]]:
    """Who takes part, in which versions, and who does not and why."""
    nixl, lmcache = options.nixl_python, options.lmcache_python
    makes: dict[str, Make] = {
        "s3kv": lambda run, _: contenders.s3kv(store, run),
        "s3kv-compressed": lambda run, _: contenders.s3kv(
            store, run, "s3kv-compressed", compress="on"
        ),
        "s3kv-disk": lambda run, _: contenders.s3kv_disk(store, folder, run),
        "offloading-s3kv": lambda run, _: contenders.offloading_s3kv(store, run),
        "offloading-obj": lambda run, _: contenders.offloading_obj(store, run, nixl),
        "offloading-fs": lambda run, _: contenders.offloading_fs(folder, run),
        "lmcache": lambda run, model: contenders.lmcache(store, folder, model, run, lmcache),
    }
    versions, left_out = _versions(sys.executable, "vllm"), {}
    for name, module, python in (("offloading-obj", "nixl", nixl), ("lmcache", "lmcache", lmcache)):
        if name in options.only and python:
            versions |= _versions(python, module)
        elif name in options.only:
            left_out[name] = f"no --{module}-python"
    return [makes[name] for name in options.only if name not in left_out], versions, left_out


def _options() -> argparse.Namespace:
    parser = command_line(__doc__, "one round, few prompts")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--users", nargs="+", type=int, default=USERS, help="at once")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, help="connectors")
    for name in ("nixl", "lmcache"):
        made = ROOT / "build" / name / "bin" / "python"
        parser.add_argument(
            f"--{name}-python",
            default=str(made) if made.exists() else None,
            help=f"the interpreter of an environment with {name}",
        )
    add_server(parser)
    return parser.parse_args()


@ends(1200)
def main() -> None:
    options = _options()
    rounds = 1 if options.quick else options.rounds
    with s3(options) as store, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        works = [work(one, folder, options.users, options.quick) for one in options.model]
        engines = sum(1 + (1 + len(w.engines)) * 5 for w in works if isinstance(w, Work))
        begin(store.name, rounds * engines * SMALL.give_up_s)
        makes, versions, left_out = _entered(options, folder, store)
        Engine.zygotes = Zygotes()
        try:
            models = _run(works, rounds, folder, store, makes)
        finally:
            Engine.zygotes.close()
        left_out |= {n: w for n, w in zip(options.model, works, strict=True) if isinstance(w, str)}
        lost = defeats.of(models)
        for row in lost:
            say("; ".join(row.values()))
        about: dict[str, Any] = {"benchmark": "peers", "defeats": lost, **store.told()}
        about |= {"machine": machine(), "versions": versions, "left_out": left_out}
        publish(about | {"rounds": rounds, "models": models}, options.json)


def _run(
    works: list[Work | str], rounds: int, folder: Path, store: Store, makes: list[Make]
) -> dict[str, Any]:
    """The results by model."""
    benches: dict[str, Bench] = {}
    for one in works:
        if isinstance(one, Work):
            server = Server(store.url or "", store.bucket, store.s3.env)
            benches[one.name] = Bench(folder, store.env, makes, one, server)
            _touch(store, one.chunks, one.size.chunk_bytes)
    for number in range(rounds):
        for name, bench in benches.items():
            say(f"round {number + 1} of {rounds}, {name}")
            bench.round()
    return {name: bench.result() for name, bench in benches.items()}


def _touch(store: Store, chunks: int, chunk_bytes: int) -> None:
    """Write and delete, so that a server that keeps its objects in memory has that memory:
    otherwise whoever saves first pays for it."""
    client, body = store.s3.client(), bytes(chunk_bytes)
    for number in range(chunks):
        client.put_object(Bucket=store.bucket, Key=f"peers/touch/{number}", Body=body)
    store.s3.empty(store.bucket, "peers/touch/")


if __name__ == "__main__":
    main()
