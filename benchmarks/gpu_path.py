"""From a bucket to a GPU and back, without an engine: `python -m benchmarks.gpu_path [--out FILE]`.

Chunks of Llama-3-8B with random blocks: I/O process, slab and copies as in a worker, on a server of
our own on the same machine, whose bucket is in memory. In turns, GB/s of

- network: blocking sockets in threads, into the pinned slab, as many as the I/O process would use
- bus: all slots to blocks of the GPU
- fetch: the I/O process alone, bucket to slab, verified
- path: bucket to blocks; every chunk is copied as soon as it is verified

and, once, of blocks to the bucket. `of_slower` is path over the slower of network and bus. The
loaded blocks are compared with those that were saved. Needs aiobotocore and msgspec beside torch.
`--device cpu` tries the program on a machine without a GPU.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

from benchmarks.deadline import ends
from benchmarks.gpu.machine import Machine, in_turn
from benchmarks.gpu.report import Report, command_line
from benchmarks.gpu.rig import CopyRig
from benchmarks.gpu.shapes import LLAMA_8B, TINY
from benchmarks.shaped import FAST, shaped
from benchmarks.sockets import RawConnection, exchange_all, raw_get
from lab.s3 import environment

if TYPE_CHECKING:
    from benchmarks.gpu.pipeline import Pipeline

NEEDED = ("aiobotocore", "botocore", "h11", "msgspec", "uvloop", "xxhash")


@ends(1200)
def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    options = command_line(__doc__, seconds=300, mib=2048).parse_args(arguments)
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"not installed, and the I/O process needs it: {', '.join(missing)}")
    machine = Machine(options.device)
    report = Report("gpu_path", machine, options)
    model = LLAMA_8B if machine.is_gpu else TINY
    copied_bytes = options.mib * 2**20 if machine.is_gpu else 2**20
    for block_tokens in (16, 128) if machine.is_gpu else (128,):
        report.part(
            f"{model.name}, {block_tokens} tokens",
            partial(
                _measured,
                partial(CopyRig, machine, model, block_tokens, copied_bytes),
                options.rounds,
            ),
        )
    return report.finish()


def _measured(make_rig: Callable[[], CopyRig], rounds: int) -> dict[str, Any]:
    from benchmarks.gpu.pipeline import Pipeline

    with ExitStack() as stack:
        # For the I/O process, which finds its own as every tool does.
        stack.enter_context(mock.patch.dict(os.environ, environment("benchmark", "benchmark")))
        rig = make_rig()
        stack.callback(rig.close)
        server = stack.enter_context(shaped(FAST))
        copies = stack.enter_context(rig.copies())
        pipeline = Pipeline(rig, copies, server.url)
        stack.callback(pipeline.close)
        saved_s = pipeline.save_all()
        connections = [RawConnection(server.url) for _ in range(pipeline.at_once)]
        for connection in connections:
            stack.callback(connection.close)
        return _compared(rig, pipeline, connections, rounds) | {
            "saved_gb_per_s": _gb(rig.copied_bytes / saved_s),
            "pinned": copies.copier.pinned,
        }


def _gb(size: float) -> float:
    """Bytes in GB, to three significant digits, so that a slow machine's rate is not 0."""
    return float(f"{size / 1e9:.3g}")


def _compared(
    rig: CopyRig, pipeline: Pipeline, connections: Sequence[RawConnection], rounds: int
) -> dict[str, Any]:
    ways: dict[str, Callable[[], float]] = {
        "network": lambda: exchange_all(raw_get, connections, pipeline.heads, pipeline.places),
        "bus": lambda: rig.load_all(pipeline.copies),
        "fetch": pipeline.fetch_all,
        "path": pipeline.fetch_and_load_all,
    }

    def rate(name: str) -> float:
        rig.forget_targets()
        seconds = ways[name]()
        if name == "path":
            rig.check()
        return rig.copied_bytes / seconds

    per_s = in_turn(ways, rounds, rate)
    medians = {name: statistics.median(rates) for name, rates in per_s.items()}
    return {
        "chunks": rig.count,
        "chunk_bytes": rig.layout.payload_bytes,
        "at_once": pipeline.at_once,
        "gb_per_s": {name: _gb(rate) for name, rate in medians.items()},
        "least_gb_per_s": {name: _gb(min(rates)) for name, rates in per_s.items()},
        "of_slower": round(medians["path"] / min(medians["network"], medians["bus"]), 3),
        "of_fetch": round(medians["path"] / medians["fetch"], 3),
    }


if __name__ == "__main__":
    main()
