"""s3kv beside other connectors, on one machine, in one run: `python -m benchmarks.peers`.

One request after another: prompts of 1,600 tokens, 64 KiB of KV per token, eight tokens out, the
median over all prompts and rounds. With `--large` prompts have 8,000 tokens of 128 KiB. Every round
starts, in turn,

    none     an engine without a connector: a cold pass, then the same prompts again, which hit the
             engine's own prefix cache (`local`)

and for each connector, in another order every round,

    cold     an engine with nothing to find: computes, saves
    warm     a new engine, which finds what `cold` has left behind

    s3kv             this project
    offloading-s3kv  vLLM's OffloadingConnector, tier `s3kv`: this project's
    offloading-obj   vLLM's OffloadingConnector, tier `obj`: NIXL's S3 plugin   --nixl-python
    offloading-fs    vLLM's OffloadingConnector, tier `fs`: files in a temporary folder, no S3
    lmcache          LMCacheConnectorV1 in the engine's process, S3 remote      --lmcache-python

A time counts only if the work was done: every pass has to give the tokens of the engine without a
connector (a warm one those of `local`, where the hit is as long), a cold pass has to hit nothing
and to leave every chunk behind, a warm one has to hit what `local` hits, all of it in the connector
by the engine's own count. A pass that fails is told with what is wrong, and without a time.

With --delay-ms every request for S3 reaches the server so much later, as one to a server in another
building does; the server here answers at once, which no S3 in the cloud does.

How to give the other connectors environments of their own, and what stands in for a GPU:
docs/peers-benchmark.md. Whoever gets none is left out, and the result says so.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.deadline import begin, ends, say
from benchmarks.floor import Server
from benchmarks.peers import contenders
from benchmarks.peers.bench import Bench, Make
from benchmarks.peers.contenders import Bucket
from benchmarks.rig import LARGE, SMALL, add_server, machine, publish, s3
from lab.distance import distant
from lab.models import build
from lab.s3 import S3Server

ENGINES = 11
"""Of a round with all contenders."""
VERSIONS = """
import sys
from importlib.metadata import packages_distributions, version
distributions = packages_distributions()
print(*(version(distributions[module][0]) for module in sys.argv[1:]))
"""


def _versions(python: str, *modules: str) -> dict[str, str]:
    command = [python, "-c", VERSIONS, *modules]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return dict(zip(modules, done.stdout.split(), strict=True))


def _entered(
    options: argparse.Namespace, folder: Path, bucket: Bucket, model: Path, host_gib: int
) -> tuple[list[Make], dict[str, str], dict[str, str]]:
    """Who takes part, in which versions, and who does not and why."""
    makes: list[Make] = [
        lambda run: contenders.s3kv(bucket, run, host_gib),
        lambda run: contenders.offloading_s3kv(bucket, run, host_gib),
        lambda run: contenders.offloading_fs(folder, run.replace("/", "-"), host_gib),
    ]
    versions, left_out = _versions(sys.executable, "vllm"), {}
    if nixl := options.nixl_python:
        makes.append(lambda run: contenders.offloading_obj(bucket, run, host_gib, nixl))
        versions |= _versions(nixl, "nixl")
    else:
        left_out["offloading-obj"] = "no --nixl-python"
    if not (options.lmcache_python and options.lmcache_host):
        left_out["lmcache"] = "no --lmcache-python, or no --lmcache-host"
    else:
        lmcache = options.lmcache_python
        makes.append(
            lambda run: contenders.lmcache(
                bucket, folder, model, run.replace("/", "-"), host_gib, lmcache
            )
        )
        versions |= _versions(lmcache, "lmcache")
    return makes, versions, left_out


def _away(url: str, delay_ms: float) -> AbstractContextManager[str]:
    return distant(url, delay_ms) if delay_ms else nullcontext(url)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="one round, few prompts")
    parser.add_argument("--large", action="store_true", help="8,000 tokens of 128 KiB a prompt")
    parser.add_argument("--json", type=Path, help="a file for the result")
    parser.add_argument("--nixl-python", help="the interpreter of an environment with nixl")
    parser.add_argument("--lmcache-python", help="the interpreter of an environment with lmcache")
    parser.add_argument(
        "--lmcache-host",
        metavar="HOST:PORT",
        help="under which the server answers for the bucket (virtual-host addressing)",
    )
    parser.add_argument(
        "--delay-ms", type=float, default=0.0, help="how much longer every request for S3 takes"
    )
    add_server(parser)
    return parser.parse_args()


@ends(1200)
def main() -> None:
    options = _options()
    if options.delay_ms and options.shaped:
        sys.exit("--delay-ms is not for --shaped: it has --first-byte-ms")
    if (
        options.delay_ms
        and os.environ.get("S3KV_BUCKET")
        and not os.environ.get("AWS_ENDPOINT_URL")
    ):
        sys.exit("--delay-ms needs AWS_ENDPOINT_URL beside S3KV_BUCKET: the proxy has to know it")
    with (
        s3(options) as store,
        _away(store.url or "", options.delay_ms) as url,
        tempfile.TemporaryDirectory() as name,
    ):
        folder = Path(name)
        rounds = 1 if options.quick else options.rounds
        size = LARGE if options.large else SMALL
        size = size.quick() if options.quick else size
        begin(store.name, rounds * ENGINES * size.give_up_s)
        s3_server = S3Server(url or None, store.s3.env)
        virtual_host = options.lmcache_host
        if virtual_host and (options.delay_ms or options.shaped):
            virtual_host = f"{virtual_host.partition(':')[0]}:{urlsplit(url).port}"
        bucket = Bucket(s3_server, store.bucket, virtual_host, store.ca_bundle)
        model = build(folder, size.preset)
        makes, versions, left_out = _entered(options, folder, bucket, model, size.host_gib)
        bench = Bench(
            folder,
            store.env,
            makes,
            model,
            size,
            server=Server(url, bucket.name, s3_server.env),
        )
        bucket.touch("peers/touch", size.prompts * size.chunks_per_prompt, size.chunk_bytes)
        for number in range(rounds):
            say(f"round {number + 1} of {rounds}")
            bench.round()
        about: dict[str, Any] = {"benchmark": "peers", **store.told(), "machine": machine()}
        about["delay_ms"] = options.delay_ms
        who = {"versions": versions, "left_out": left_out}
        publish(about | who | bench.result(), options.json)


if __name__ == "__main__":
    main()
