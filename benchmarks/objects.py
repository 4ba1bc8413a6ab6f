"""Speed and processor time of the object tier: `python -m benchmarks.objects [URL]`.

8 MiB objects (`--object-bytes`), 8 at once. Each row runs in a process of its own, rows take turns,
and every figure is the median over the rounds. `ratio` is the row's MB/s over that of plain
blocking sockets in threads in the same round, which is what this machine and this server can give;
`cpu_s_per_gib` is the client process's processor time while bytes moved, and `cpu_us_per_request`
the same by request. "raw get alone" is one such socket in one thread: threads of Python cost
processor time when they take turns. "get encrypted" and "put encrypted" are "get" and "put" with
AES-GCM. The rows "get aiobotocore" and "put aiobotocore" go through AWS's SDK instead of our own
client. Credentials are botocore's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from time import perf_counter, process_time
from typing import Literal

import boto3
import uvloop
from botocore.config import Config as BotoConfig

from benchmarks.deadline import begin, command_line, ends, say
from benchmarks.rig import Store, add_server, machine, publish, s3
from benchmarks.shaped import BUCKET
from benchmarks.sockets import RawConnection, exchange_all, head, raw_get, raw_put
from s3kv.config import Config
from s3kv.io.sources.encrypted_store import EncryptedStore
from s3kv.objects.codec import ChunkFormat
from s3kv.objects.encryption import Keyring
from s3kv.objects.keys import Namespace
from s3kv.place import Place
from s3kv.stores.s3.s3_store import open_store
from s3kv.stores.store import ObjectStore
from s3kv.types import ChunkKey, TensorSpec

AT_ONCE = 8
HASH = bytes(32)
NAMESPACE = Namespace("s3kv-benchmark", "0" * 32)
KEYS = [NAMESPACE.chunk(ChunkKey(0, bytes([i] * 32)), "whole") for i in range(AT_ONCE)]
MASTER = bytes(range(32))
ROWS = (
    *("raw get", "raw get alone", "get", "get asyncio", "get checked", "get encrypted"),
    *("get aiobotocore", "raw put", "put", "put asyncio", "put encrypted", "put aiobotocore"),
)


def layout(object_bytes: int) -> ChunkFormat:
    """A chunk of about this size."""
    tensor = TensorSpec("kv", "U8", (object_bytes - 4096,))
    return ChunkFormat("0" * 32, (tensor,), 0, "h0-7of8-l0-31of32")


def row(name: str, url: str, bucket: str, requests: int, chunk: ChunkFormat) -> dict[str, float]:
    buffers = [memoryview(bytearray(chunk.object_bytes)) for _ in range(AT_ONCE)]
    for buffer in buffers:
        buffer[:] = b"\x5a" * len(buffer)  # its pages exist before the clock starts
        chunk.seal(Place.of(buffer, chunk.header_bytes), HASH)
    if name.startswith("raw"):
        method, *alone = name.removeprefix("raw ").upper().split()
        wall_s, cpu_s = raw(method, url, bucket, requests, buffers[:1] if alone else buffers)
    else:
        work = ours(name, url, bucket, requests, buffers, chunk)
        wall_s, cpu_s = asyncio.run(work) if "asyncio" in name else uvloop.run(work)
    return {"wall_s": wall_s, "cpu_s": cpu_s}


async def ours(
    name: str, url: str, bucket: str, requests: int, buffers: list[memoryview], chunk: ChunkFormat
) -> tuple[float, float]:
    client: Literal["aiobotocore", "fast"] = "aiobotocore" if "aiobotocore" in name else "fast"
    store: ObjectStore = open_store(Config(bucket=bucket, endpoint_url=url, client=client))
    if "encrypted" in name:
        store = EncryptedStore(store, Keyring([MASTER]))
    left = list(range(requests))

    async def work(key: str, buffer: memoryview) -> None:
        while left:
            left.pop()
            if name.startswith("put"):
                await store.put(key, Place.of(buffer), if_absent=False)
                continue
            info = await store.get_into(key, Place.of(buffer))
            assert info is not None
            assert info.nbytes == chunk.object_bytes
            if name == "get checked":
                assert chunk.check(Place.of(buffer, chunk.header_bytes), info.nbytes, HASH) is None

    await store.check()
    started_s, cpu_s = perf_counter(), process_time()
    await asyncio.gather(*(work(k, b) for k, b in zip(KEYS, buffers, strict=True)))
    taken = perf_counter() - started_s, process_time() - cpu_s
    await store.close()
    return taken


def raw(
    method: str, url: str, bucket: str, requests: int, buffers: list[memoryview]
) -> tuple[float, float]:
    settings = BotoConfig(signature_version="s3v4", s3={"addressing_style": "path"})
    client = boto3.client("s3", endpoint_url=url, config=settings)
    nbytes = len(buffers[0]) if method == "PUT" else 0
    heads = [head(client, method, bucket, key, nbytes) for key in KEYS[: len(buffers)]]
    exchange = raw_get if method == "GET" else raw_put
    connections = [RawConnection(url) for _ in heads]
    times, cpu_s = -(-requests // len(heads)), process_time()
    bodies = (heads * times)[:requests], (buffers * times)[:requests]
    taken = exchange_all(exchange, connections, *bodies), process_time() - cpu_s
    for connection in connections:
        connection.close()
    return taken


ROW_S = 600.0
"""Longest time of a row; after it the benchmark ends with `TimeoutExpired`."""


@ends(600)
def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line(__doc__, "one round of 16 requests a row")
    parser.add_argument("url", nargs="?", help="of the server, if not as in benchmarks/rig.py")
    parser.add_argument("--bucket", default=BUCKET)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--object-bytes", type=int, default=8 * 2**20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--row", choices=ROWS, help="run this one, once, in this process")
    add_server(parser)
    args = parser.parse_args(arguments)
    chunk = layout(args.object_bytes)
    if args.quick:
        args.requests, args.rounds = 2 * AT_ONCE, 1
    if args.row is not None:
        print(json.dumps(row(args.row, args.url, args.bucket, args.requests, chunk)))
        return
    with nullcontext(Store(args.url, args.url, args.bucket)) if args.url else s3(args) as store:
        begin(store.name, ROW_S * len(ROWS) * args.rounds)
        args.url, args.bucket = store.url, store.bucket
        os.environ |= store.env
        for name in ("put", "put encrypted"):
            row(name, args.url, args.bucket, AT_ONCE, chunk)
        rounds = [{name: child(name, args) for name in ROWS} for _ in range(args.rounds)]
        result = {
            "benchmark": "objects",
            **store.told(),
            "machine": machine(),
            "objects": f"{AT_ONCE} at once of {chunk.object_bytes:,} bytes",
            "requests": args.requests,
            "rounds": args.rounds,
            "rows": report(rounds, args.requests, chunk.object_bytes),
        }
    publish(result, args.json)


def child(name: str, args: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.objects", args.url, "--bucket", args.bucket]
    command += ["--requests", str(args.requests), "--row", name]
    command += ["--object-bytes", str(args.object_bytes)]
    say(f"row: {name}")
    out = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, env=os.environ, timeout=ROW_S
    ).stdout
    taken: dict[str, float] = json.loads(out)
    return taken


def report(
    rounds: list[dict[str, dict[str, float]]], requests: int, object_bytes: int
) -> dict[str, dict[str, float]]:
    rows = {}
    nbytes = requests * object_bytes
    for name in ROWS:
        base = "raw put" if "put" in name else "raw get"
        walls = [r[name]["wall_s"] for r in rounds]
        ratios = [r[base]["wall_s"] / r[name]["wall_s"] for r in rounds]
        cpus = [r[name]["cpu_s"] for r in rounds]
        rows[name] = {
            "mb_per_s": round(nbytes / statistics.median(walls) / 1e6),
            "ratio": round(statistics.median(ratios), 2),
            "cpu_us_per_request": round(statistics.median(cpus) / requests * 1e6),
            "cpu_s_per_gib": round(statistics.median(cpus) / nbytes * 2**30, 3),
        }
    return rows


if __name__ == "__main__":
    main()
