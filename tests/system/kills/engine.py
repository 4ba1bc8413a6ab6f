"""An engine process to be killed: `python -m tests.system.kills.engine ENDPOINT BUCKET SEED
SETTINGS`.

The planner and the small engine of `tests/unit/planning` over two worker processes, each with an
I/O process, all of them real; requests without end. Says in JSON lines what has happened so far,
ends cleanly at the end of stdin, and dies of anything that is wrong: also of a dead worker, as vLLM
does.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import select
import sys
import time
from collections import Counter
from collections.abc import Iterable
from itertools import count
from multiprocessing.connection import Connection
from typing import Any

from lab.books import check
from s3kv.config import Config
from s3kv.messages import BucketJob, StepPlan, StepReport
from tests.system.kills import worker
from tests.system.kills.prompts import NEW_TOKENS, PROMPTS, dictionary
from tests.system.kills.worker import SETUP
from tests.unit.planning.engine import Engine
from tests.unit.planning.ranks import Write
from tests.unit.planning.setup import Request

_STEP_S = 0.002
_TELL_S = 0.05
_REQUESTS = 6


class Blocks:
    """Those of the worker, asked for one by one."""

    def __init__(self, rank: RemoteRank) -> None:
        self._rank = rank

    def __getitem__(self, number: int) -> Any:
        return self._rank.ask("block", number)


class RemoteRank:
    """A rank in a worker process, as `tests.unit.planning.engine.Engine` wants one."""

    def __init__(self, number: int, config: Config, seed: int) -> None:
        self.number = number
        self.blocks = Blocks(self)
        self.orders: dict[int, BucketJob] = {}
        self.report = StepReport()
        self.loaded: dict[str, bool] = {}
        self.seen: Counter[str] = Counter()
        self._pipe, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("fork")
        self.process = context.Process(
            target=_serve, args=(self._pipe, theirs, number, config, seed), daemon=True
        )
        self.process.start()
        theirs.close()

    def wait_ready(self) -> None:
        self.io_pid = self._pipe.recv()

    def ask(self, *command: object) -> Any:
        self._pipe.send(command)
        return self._pipe.recv()

    def run(self, plan: StepPlan, writes: Iterable[Write]) -> None:
        report, loaded, self.orders, self.io_pid, self.seen = self.ask("run", plan, list(writes))
        self.report.merge(report)
        self.loaded.update(loaded)

    def take_report(self) -> StepReport:
        report, self.report = self.report, StepReport()
        return report

    def stop(self) -> None:
        self.ask("stop")
        self.process.join()


def _serve(ours: Connection, theirs: Connection, *args: Any) -> None:
    ours.close()  # so that the engine's death is the end of the pipe
    worker.serve(theirs, *args)


class Life:
    def __init__(self, config: Config, rng: random.Random) -> None:
        self.ranks = [
            RemoteRank(number, config, rng.randrange(2**32)) for number in range(SETUP.world_size)
        ]
        for rank in self.ranks:
            rank.wait_ready()
        self.engine = Engine(SETUP, ranks=self.ranks, prefixes=dictionary(), numbers=count(1))
        self._rng = rng
        self._arrived = 0
        self._told_s = 0.0

    @property
    def requests(self) -> list[Request]:
        engine = self.engine
        queues = (engine.loading.values(), engine.waiting, engine.running)
        return [request for queue in queues for request in queue if not request.over]

    def serve(self) -> None:
        while not select.select([sys.stdin], [], [], 0)[0]:
            if len(self.requests) < _REQUESTS:
                self._arrived += 1
                self.engine.arrive(f"r{self._arrived}", self._rng.choice(PROMPTS), NEW_TOKENS)
            if self._rng.random() < 0.05:
                self._disturb()
            self.step()

    def _disturb(self) -> None:
        engine, requests = self.engine, self.requests
        if requests and self._rng.random() < 0.2:
            engine.abort(self._rng.choice(requests))
        elif engine.running:
            engine.preempt(self._rng.choice(engine.running))
            engine.pool.forget()

    def step(self) -> None:
        self.engine.now_s = time.monotonic()
        self.engine.step(budget=64)
        if self.engine.now_s - self._told_s > _TELL_S:
            self._told_s = self.engine.now_s
            self.tell()
        time.sleep(_STEP_S)

    def tell(self, **more: object) -> None:
        what = {
            "engine": os.getpid(),
            "workers": [rank.process.pid for rank in self.ranks],
            "io": [rank.io_pid for rank in self.ranks],
            "counters": self.engine.what_happened(),
            **more,
        }
        print(json.dumps(what), flush=True)

    def end(self) -> None:
        """Answer what has been asked, come to rest, and have nothing left."""
        deadline_s = time.monotonic() + 120.0
        ledger = self.engine.planner.ledger
        while (figures := ledger.table.statistics()).pinned or self.requests or self._is_moving:
            assert time.monotonic() < deadline_s, f"it does not come to rest: {figures}"
            self.step()
        check(self.engine.planner)
        assert (figures.reserved, figures.pinned, figures.dirty) == (0, 0, 0), figures
        for rank in self.ranks:
            rank.stop()
        self.tell(rests=True)

    @property
    def _is_moving(self) -> bool:
        ledger = self.engine.planner.ledger
        return ledger.saves_inflight > 0 or ledger.fetches_inflight > 0


def main() -> None:
    endpoint, bucket, seed, settings = sys.argv[1:]
    config = Config(
        bucket=bucket, endpoint_url=endpoint, request_timeout_ms=5_000, **json.loads(settings)
    )
    life = Life(config, random.Random(int(seed)))
    life.tell()
    life.serve()
    life.end()


if __name__ == "__main__":
    main()
