"""How much slower the engine's own work gets while chunks are copied beside it."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from itertools import count
from time import perf_counter
from typing import Any

import torch

from benchmarks.gpu.machine import Machine, spread
from benchmarks.gpu.rig import CopyRig, ended
from s3kv.device.copies import BlockCopies
from s3kv.messages import CopyPart

_UNDER_WAY = 16
"""Chunks on their way at any time without a pause, so that the bus is never idle."""
_PACED_BYTES_PER_S = 5e9
"""What an engine saves that prefills 40,000 tokens a second, of 128 KiB each."""
_SCHEDULED, _SAMPLED = 16 * 1024, 256
"""Numbers in the small copies of a step: rows of a block table, and a token of each request."""
_STEPS_AHEAD = 2
"""What an engine launches before it has read what came out of a step."""

KINDS = ("none", "saves", "paced saves", "loads")


class Background:
    """Copies of one of `KINDS`, ordered between an engine's steps."""

    def __init__(self, rig: CopyRig, copies: BlockCopies, kind: str) -> None:
        self._rig = rig
        self._copies = copies
        self._kind = kind
        self._numbers = count()
        self._under_way = 0
        self._since_s = perf_counter()
        self.copied = 0

    def keep_going(self) -> None:
        """For the engine's thread, once per step."""
        done = ended(self._copies)
        self._under_way -= done
        self.copied += done
        while self._under_way < self._allowed():
            number = next(self._numbers)
            slot = number % self._rig.count
            if self._kind == "loads":
                part = CopyPart(0, slot, 0, self._rig.targets[slot])
                self._copies.load(str(number), [part])
            else:
                self._copies.save(number, 0, slot, self._rig.sources[slot])
            self._under_way += 1

    def stop(self) -> None:
        self._kind = "none"
        while self._under_way:
            self.keep_going()

    def _allowed(self) -> int:
        """How many may be on their way now."""
        most = min(_UNDER_WAY, self._rig.count)
        if self._kind == "paced saves":
            due_bytes = (perf_counter() - self._since_s) * _PACED_BYTES_PER_S
            return min(most, int(due_bytes / self._rig.layout.payload_bytes) - self.copied)
        return 0 if self._kind == "none" else most


def products(machine: Machine, size: int) -> Callable[[], object]:
    """A step that keeps all multiprocessors busy."""
    a, b = (torch.randn(size, size, device=machine.device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return machine.captured(lambda: torch.mm(a, b, out=out))


def decoding(machine: Machine, layers: int, width: int) -> Callable[[], object]:
    """A step as of a model that decodes: products of few rows with weights that come from memory,
    and small kernels between them; a graph, as engines have it."""
    make: dict[str, Any] = {"device": machine.device, "dtype": torch.bfloat16}
    weights = [torch.randn(width, width, **make) / width**0.5 for _ in range(layers)]
    rows = torch.randn(16, width, **make)
    state = rows.clone()

    def step() -> None:
        state.copy_(rows)
        for weight in weights:
            state.add_(torch.mm(state, weight))
            state.mul_(torch.rsqrt(state.float().pow(2).mean(-1, keepdim=True) + 1e-5))

    return machine.captured(step)


def with_small_copies(machine: Machine, step: Callable[[], object]) -> Callable[[], object]:
    """The step as an engine runs it: what was scheduled goes in before, in two copies, and what was
    sampled comes out behind, outside its graph. A copy engine is given to one stream's copies as
    long as they are back to back, however urgent another's are (pytorch/torchrec#4303), so these
    may wait for chunks.
    """
    here = [torch.zeros(size, dtype=torch.int32) for size in (_SCHEDULED, _SCHEDULED, _SAMPLED)]
    ids, table, sampled = [each.pin_memory() for each in here] if machine.is_gpu else here
    ids_there, table_there, sampled_there = [each.to(machine.device) for each in here]

    def launch() -> None:
        ids_there.copy_(ids, non_blocking=True)
        table_there.copy_(table, non_blocking=True)
        step()
        sampled.copy_(sampled_there, non_blocking=True)

    return launch


def measure(
    machine: Machine, rig: CopyRig, step: Callable[[], object], *, steps: int, rounds: int
) -> dict[str, Any]:
    """Milliseconds of a step with each kind of copies beside it, and how much slower they make it;
    the kinds take turns."""
    return rig.measured(lambda copies: _compared(machine, rig, copies, step, steps, rounds))


def _compared(
    machine: Machine,
    rig: CopyRig,
    copies: BlockCopies,
    step: Callable[[], object],
    steps: int,
    rounds: int,
) -> dict[str, Any]:
    rig.save_all(copies)
    step_ms: dict[str, list[float]] = {kind: [] for kind in KINDS}
    rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for turn in range(rounds + 1):
        for kind in KINDS:
            background = Background(rig, copies, kind)
            with machine.new_stream():
                seconds = machine.seconds(lambda: _engine(machine, step, steps, background))  # noqa: B023
            copied = background.copied
            background.stop()
            if turn:  # the first warms up
                step_ms[kind].append(1e3 * seconds / steps)
                rates[kind].append(copied * rig.layout.payload_bytes / seconds / 1e9)
    alone = statistics.median(step_ms["none"])
    return {
        kind: {
            "ms": spread(step_ms[kind], 4),
            "slower": round(statistics.median(step_ms[kind]) / alone - 1, 4),
            "gb_per_s": round(statistics.median(rates[kind]), 2),
        }
        for kind in KINDS
    }


def _engine(
    machine: Machine, step: Callable[[], object], steps: int, background: Background
) -> None:
    """Steps as an engine launches them, which knows of each when it is over."""
    under_way: deque[Callable[[], object]] = deque()
    for _ in range(steps):
        step()
        under_way.append(machine.step_ended())
        background.keep_going()
        if len(under_way) > _STEPS_AHEAD:
            under_way.popleft()()
