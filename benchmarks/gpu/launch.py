"""What handing a chunk over costs the engine's thread."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter, sleep
from typing import Any

from benchmarks.gpu.machine import Machine, spread
from benchmarks.gpu.rig import LONG_S, CopyRig, ended
from benchmarks.gpu.shapes import Model
from s3kv.device.copies import BlockCopies
from s3kv.messages import CopyPart

_PAUSE_S = 200e-6
"""Between chunks: an engine has a step's work to launch, and lets go of the GIL while it does."""


def measure(machine: Machine, model: Model, block_tokens: int, chunks: int) -> dict[str, Any]:
    """Microseconds of each call: `save`, `fence` right behind it, `load` of one chunk, and `poll`
    while copies are under way."""
    rig = CopyRig(machine, model, block_tokens, 0)
    found: dict[str, Any] = {
        "layers": model.layers,
        "blocks": rig.layout.blocks_per_chunk,
        "chunks": chunks,
    }
    return found | rig.measured(lambda copies: _calls(rig, copies, chunks))


def _calls(rig: CopyRig, copies: BlockCopies, chunks: int) -> dict[str, Any]:
    rig.save_all(copies)
    took_s: dict[str, list[float]] = {name: [] for name in ("save", "fence", "load", "poll")}

    def timed(name: str, call: Callable[[], object]) -> None:
        begin_s = perf_counter()
        call()
        took_s[name].append(perf_counter() - begin_s)

    under_way = 0

    def poll() -> None:
        nonlocal under_way
        under_way -= ended(copies)

    def settle() -> None:
        deadline_s = perf_counter() + LONG_S
        while under_way:
            timed("poll", poll)
            sleep(_PAUSE_S)
            assert perf_counter() < deadline_s, "copies do not end"

    for number in range(chunks):
        slot, ids = number % rig.count, rig.sources[number % rig.count]
        part = CopyPart(0, slot, 0, rig.targets[slot])
        under_way += 1
        timed("save", partial(copies.save, number, 0, slot, ids))
        sleep(_PAUSE_S)
        timed("fence", partial(copies.fence, [number]))
        settle()
        under_way += 1
        timed("load", partial(copies.load, str(number), [part]))
        settle()
    return {name: spread([1e6 * took for took in all_s], 1) for name, all_s in took_s.items()}
