"""Runs seeds: in virtual time, alone or in a pool of processes, and says which ones failed."""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing
import os
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple
from unittest import mock

from lab.constants import changed
from s3kv.io import client
from s3kv.io.sources import hedging
from s3kv.upkeep.cleaner import Cleaner
from tests.system.sim.cleaners import KeptFleet
from tests.system.sim.disks import disk_fleet
from tests.system.sim.fleet import Fleet
from tests.system.sim.loop import VirtualLoop
from tests.system.sim.process import Process
from tests.system.sim.sharers import SharingFleet
from tests.system.sim.store import PlannedDefect
from tests.unit.planning.oracle import FINDINGS


def _tier_fleet(seed: int, log: Callable[[str], None] | None) -> Fleet:
    from tests.system.sim.tiers import tier_fleet  # imports vLLM, which takes seconds

    return tier_fleet(seed, log)


FLEETS: dict[str, Callable[[int, Callable[[str], None] | None], Fleet]] = {
    "plain": Fleet,
    "kept": KeptFleet,
    "shared": SharingFleet,
    "tiers": _tier_fleet,
    "disks": disk_fleet,
}


class Failure(NamedTuple):
    seed: int
    error: str
    fleet: str = "plain"
    is_finding: bool = True
    """An oracle or a rule has found it: it is no error of the code, such as a name that is gone."""

    def __str__(self) -> str:
        kept = "" if self.fleet == "plain" else f" --{self.fleet}"
        replay = f"python -m tests.system.sim {self.seed} --trace{kept}"
        return f"seed {self.seed}: {self.error}\nreplay: {replay}"


@contextlib.contextmanager
def virtual_time(loop: VirtualLoop) -> Iterator[None]:
    """The clock, the sleep and the child process of the code under test are the simulation's."""

    def sleep(seconds: float) -> None:
        loop.run_until(loop.time() + seconds)

    with (
        mock.patch.object(time, "monotonic", loop.time),
        mock.patch.object(time, "sleep", sleep),
        mock.patch.object(client, "Child", Process),
        mock.patch.dict(Cleaner.__init__.__kwdefaults__, {"clock": loop.time}),
        # A simulated process does not live long enough to know what is late by more.
        mock.patch.object(hedging, "_FEWEST_SAMPLES", 3),
    ):
        yield


class _Defects(logging.Handler):
    """Hears of the exceptions that the service did not expect."""

    def __init__(self, accuse: Callable[[str], None]) -> None:
        super().__init__(logging.ERROR)
        self._accuse = accuse

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and not isinstance(record.exc_info[1], PlannedDefect):
            self._accuse(record.getMessage())


@contextlib.contextmanager
def _listening(accuse: Callable[[str], None]) -> Iterator[None]:
    handler = _Defects(accuse)
    loggers = [logging.getLogger(name) for name in ("s3kv", "s3kv.io")]
    before = [(logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.propagate = False
        logger.setLevel(logging.ERROR)
    loggers[0].addHandler(handler)
    loggers[1].addHandler(handler)
    try:
        yield
    finally:
        for logger, (level, propagate) in zip(loggers, before, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(level)
            logger.propagate = propagate


def run_seed(
    seed: int, log: Callable[[str], None] | None = None, kind: str = "plain"
) -> Counter[str]:
    """One run; how often what happened. Raises what is wrong."""
    fleet = FLEETS[kind](seed, log)
    with (
        virtual_time(fleet.loop),
        _listening(fleet.loop.failures.append),
        changed(**fleet.constants),
    ):
        try:
            fleet.run()
        finally:
            fleet.loop.give_up()
    return fleet.seen


def try_seeds(
    seeds: Sequence[int], failures_wanted: int = 3, kind: str = "plain"
) -> tuple[Counter[str], list[Failure]]:
    """Run them, until so many have failed."""
    seen: Counter[str] = Counter()
    failures: list[Failure] = []
    for seed in seeds:
        try:
            seen += run_seed(seed, kind=kind)
            continue
        except Exception as error:  # noqa: BLE001 - whatever it is, the seed has failed
            frame = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{os.path.basename(frame.filename)}:{frame.lineno}"
            what = f"{type(error).__name__} in {where}: {error}"
            failures.append(Failure(seed, what, kind, isinstance(error, FINDINGS)))
        _collect_garbage()
        if len(failures) == failures_wanted:
            break
    return seen, failures


def _collect_garbage() -> None:
    """Collect a failed fleet now, and not during a later run, where its coroutines would fail."""
    with mock.patch.object(sys, "unraisablehook"), warnings.catch_warnings(action="ignore"):
        gc.collect()


def run_seeds(first: int, count: int, kind: str = "plain") -> tuple[Counter[str], list[Failure]]:
    """All of them, on all processors. The processes are new ones: what the caller has imported,
    patched or started is not theirs."""
    # Those of some kinds import vLLM, which takes as long as many runs.
    size = {"kept": 5, "plain": 50, "shared": 15}.get(kind, 75)
    parts = [range(i, min(i + size, first + count)) for i in range(first, first + count, size)]
    seen: Counter[str] = Counter()
    failures: list[Failure] = []
    context = multiprocessing.get_context("spawn")
    with context.Pool(os.cpu_count()) as pool:
        for some_seen, some_failures in pool.imap_unordered(partial(try_seeds, kind=kind), parts):
            seen += some_seen
            failures += some_failures
            if len(failures) >= 10:
                pool.terminate()
                break
    return seen, sorted(failures)


def main(arguments: Sequence[str]) -> int:
    """`SEED [--trace]`, or `FIRST COUNT` for many; with `--kept`, fleets that keep a budget; with
    `--shared`, fleets that share between parallel sizes; with `--tiers`, fleets of tiers; with
    `--disks`, fleets with local disks."""
    trace = "--trace" in arguments
    kind = next((kind for kind in FLEETS if f"--{kind}" in arguments), "plain")
    numbers = [int(argument) for argument in arguments if not argument.startswith("-")]
    if len(numbers) == 2:
        seen, failures = run_seeds(*numbers, kind)
        for failure in failures:
            print(failure)
        print(dict(sorted(seen.items())))
        return bool(failures)
    run_seed(numbers[0], print if trace else None, kind)
    print(f"seed {numbers[0]} is fine", file=sys.stderr)
    return 0
