"""Copies beside a thread that computes in Python: `python -m benchmarks.gpu_busy [--out FILE]`.

An engine's thread spends most of a step in Python and in launches of kernels, and shares the GIL
and the driver's locks with the thread that launches copies. Random blocks of Llama-3-8B in chunks
of 256 tokens:

- thread: how many rounds of a loop, some Python and the launch of a kernel, a thread manages in a
  second, alone, and while chunks are saved, or loaded, without a pause; `slower` is what of it is
  theirs
- launch: microseconds from a save's order until a fence behind it returns, which it does when the
  copy is launched, with the GIL free and with a busy thread
- fence: so many saves are queued at once, and the newest is fenced; microseconds of the engine's
  thread in the fence, and milliseconds until what it launches behind the fence has run

Every part is written to FILE when it is measured; after --seconds no part is begun. `--device cpu`
tries the program on a machine without a GPU: its figures mean nothing.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from time import perf_counter, sleep
from typing import Any

import torch

from benchmarks.deadline import ends
from benchmarks.gpu.drag import KINDS, Background
from benchmarks.gpu.machine import Machine, in_turn, spread
from benchmarks.gpu.report import Report, command_line
from benchmarks.gpu.rig import CopyRig
from benchmarks.gpu.shapes import CHUNK_TOKENS, LLAMA_8B, TINY
from s3kv.device.copies import BlockCopies

BLOCK_TOKENS = 16
QUEUED = 256
LAUNCHES_AHEAD = 50
STEP_S = 1e-3
"""How often the thread that stands for an engine's hooks orders copies and polls."""


class BusyThread:
    """A loop of some Python and the launch of a small kernel, never far ahead of the GPU."""

    def __init__(self, machine: Machine) -> None:
        self.rounds = 0
        self._machine = machine
        self._over = False
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        numbers = torch.zeros(256, device=self._machine.device)
        with self._machine.new_stream():
            while not self._over:
                launched = self._machine.step_ended()
                for _ in range(LAUNCHES_AHEAD):
                    sum(range(100))
                    numbers.add_(1)
                    self.rounds += 1
                launched()

    def stop(self) -> None:
        self._over = True
        self._thread.join()


@ends(1200)
def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    options = command_line(__doc__, seconds=60, mib=0).parse_args(arguments)
    machine = Machine(options.device)
    report = Report("gpu_busy", machine, options, queued=QUEUED)
    measures: dict[str, Callable[[CopyRig, BlockCopies, int], dict[str, Any]]] = {
        "fence": _fence,
        "launch": _launch,
        "thread": partial(_thread, seconds=0.5 if machine.is_gpu else 0.05),
    }
    for name, measure in measures.items():
        report.part(name, partial(_measured, machine, measure, options.rounds))
    return report.finish()


def _measured(
    machine: Machine, measure: Callable[[CopyRig, BlockCopies, int], dict[str, Any]], rounds: int
) -> dict[str, Any]:
    model, block_tokens = (LLAMA_8B, BLOCK_TOKENS) if machine.is_gpu else (TINY, 128)
    chunk_bytes = model.token_bytes * CHUNK_TOKENS
    rig = CopyRig(machine, model, block_tokens, QUEUED * chunk_bytes)

    def warm(copies: BlockCopies) -> dict[str, Any]:
        rig.save_all(copies)
        return measure(rig, copies, rounds)

    return rig.measured(warm)


def _thread(rig: CopyRig, copies: BlockCopies, rounds: int, *, seconds: float) -> dict[str, Any]:
    per_s = in_turn(
        KINDS, rounds, lambda kind: _rate_beside(Background(rig, copies, kind), seconds)
    )
    alone = statistics.median(per_s["none"])
    return {
        kind: {
            "rounds_per_s": spread(rates, 0),
            "slower": round(alone / statistics.median(rates) - 1, 4),
        }
        for kind, rates in per_s.items()
    }


def _rate_beside(background: Background, seconds: float) -> float:
    """Rounds in a second of a busy thread. Alone it has beside it one that polls as often."""
    with _busy(background.machine) as busy:
        before, begin_s = busy.rounds, perf_counter()
        while perf_counter() - begin_s < seconds:
            background.keep_going()
            sleep(STEP_S)
        rate = (busy.rounds - before) / (perf_counter() - begin_s)
    background.stop()
    return rate


def _launch(rig: CopyRig, copies: BlockCopies, rounds: int) -> dict[str, Any]:
    alone = _launched(rig, copies, rounds)
    with _busy(rig.machine):
        beside = _launched(rig, copies, rounds)
    return {"alone_us": spread(alone, 1), "beside_busy_us": spread(beside, 1)}


def _launched(rig: CopyRig, copies: BlockCopies, rounds: int) -> list[float]:
    found = []
    for number in range(10 * rounds):
        slot = number % rig.count
        begin_s = perf_counter()
        copies.save(number, 0, slot, rig.sources[slot])
        copies.fence([number])
        found.append(1e6 * (perf_counter() - begin_s))
        rig.drain(copies, 1)
    return found


def _fence(rig: CopyRig, copies: BlockCopies, rounds: int) -> dict[str, Any]:
    stalls: dict[str, list[float]] = {"fence_us": [], "behind_ms": [], "all_ms": []}
    newest = rig.count - 1
    for turn in range(rounds + 1):
        rig.machine.synchronize()
        begin_s = perf_counter()
        for number, blocks in enumerate(rig.sources):
            copies.save(number, 0, number, blocks)
        ordered_s = perf_counter()
        copies.fence([newest])
        fenced_s = perf_counter()
        rig.machine.step_ended()()
        behind_s = perf_counter()
        rig.drain(copies, rig.count)
        if turn:  # the first warms up
            stalls["fence_us"].append(1e6 * (fenced_s - ordered_s))
            stalls["behind_ms"].append(1e3 * (behind_s - ordered_s))
            stalls["all_ms"].append(1e3 * (perf_counter() - begin_s))
    return {"queued": rig.count} | {name: spread(values) for name, values in stalls.items()}


@contextmanager
def _busy(machine: Machine) -> Iterator[BusyThread]:
    thread = BusyThread(machine)
    try:
        yield thread
    finally:
        thread.stop()


if __name__ == "__main__":
    main()
