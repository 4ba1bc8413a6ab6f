"""SIGKILL of a real engine and of its I/O process at random moments, under load.

The other kills of the fifty are in `tests/system/kills/`, where a start is cheap.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from lab import models
from lab.engine import Answer, Engine, Pending
from lab.s3 import S3Server
from tests.system.e2e.conftest import FLOAT32, Rig, Serve, cached, changed, tokens
from tests.system.e2e.test_failures import FEW_SLOTS
from tests.system.e2e.test_tier import with_few_rows
from tests.system.kills.aftermath import check_objects, shared_files, slabs
from tests.waiting import wait_until

CHUNKS = 4
PROMPTS = models.prompts(12, CHUNKS * 128 + 40, seed=11)


class Murder:
    """Engines on one bucket, one after the other, none of which dies in bed."""

    def __init__(self, s3: S3Server, bucket: str, directory: Path, seed: int) -> None:
        self._s3 = s3
        self._bucket = bucket
        self._directory = directory
        self.rng = random.Random(seed)
        self._lives = 0

    def engine(self, model: Path, connector: dict[str, Any], **args: Any) -> Engine:
        self._lives += 1
        log = self._directory / f"life-{self._lives}.log"
        return Engine(model, connector=connector, log_path=log, env=self._s3.env, **FLOAT32, **args)

    def load(self, engine: Engine) -> tuple[Pending, list[int]]:
        """Requests that are served, and which prompts they are; comes back in the middle."""
        numbers = self.rng.sample(range(len(PROMPTS)), 8)
        engine.reset_prefix_cache()
        pending = engine.begin_generate([PROMPTS[n] for n in numbers], concurrency=4)
        time.sleep(self.rng.uniform(0.0, 1.5))
        return pending, numbers

    def objects(self) -> int:
        return len(self._s3.objects(self._bucket))

    def kill(self, engine: Engine, process: psutil.Process) -> None:
        """And all that is left is what the harness started: no I/O process, no shared memory."""
        pids = [p.pid for p in engine.processes()]
        held, files = slabs(pids), shared_files(pids)
        assert held or any("vllm_offload" in name for name in files)
        process.kill()
        wait_until("the I/O process ends", lambda: not engine.io_processes())
        engine.kill()
        wait_until("all processes end", lambda: not engine.processes())
        wait_until("nobody holds a slab", lambda: not held & slabs())
        # What vLLM itself leaves there is its own affair.
        assert not [name for name in files if "s3kv" in name and Path(name).exists()]
        check_objects(self._s3, self._bucket)


def check(answers: Sequence[Answer], numbers: list[int], expected: Sequence[Answer]) -> None:
    assert [a.finish_reason for a in answers] == ["length"] * len(numbers)
    assert tokens(answers) == [expected[n].tokens for n in numbers]


def kill_the_core(murder: Murder, model: Path, connector: dict[str, Any]) -> None:
    """The process with the scheduler and the worker, in an engine of several."""
    engine = murder.engine(model, connector, in_process=False)
    with engine:
        murder.load(engine)
        (io_process,) = engine.io_processes()
        murder.kill(engine, io_process.parent())


def kill_the_io_process_and_the_engine(
    murder: Murder, model: Path, connector: dict[str, Any], expected: Sequence[Answer]
) -> None:
    engine = murder.engine(model, connector)
    with engine:
        pending, numbers = murder.load(engine)
        (io_process,) = engine.io_processes()
        io_process.kill()
        check([Answer(**a) for a in pending.result()], numbers, expected)
        wait_until("another I/O process stores", lambda: stored_again(murder, engine))
        murder.load(engine)
        murder.kill(engine, psutil.Process(engine.io_processes()[0].ppid()))


def stored_again(murder: Murder, engine: Engine) -> bool:
    """A new I/O process is started by the engine's next steps. Two prompts and a half are more than
    host memory holds, so their chunks are saved again until the bucket has them."""
    engine.reset_prefix_cache()
    engine.generate(PROMPTS[:3], max_tokens=2)
    return bool(engine.io_processes()) and murder.objects() >= CHUNKS


def run(
    murder: Murder,
    serve: Serve,
    model: Path,
    connector: dict[str, Any],
    expected: Sequence[Answer],
    rounds: int,
) -> None:
    for _ in range(rounds):
        kill_the_core(murder, model, connector)
        kill_the_io_process_and_the_engine(murder, model, connector, expected)
    with serve(model, connector, **FLOAT32) as engine:
        everything = list(range(len(PROMPTS)))
        answers = engine.generate(PROMPTS)  # one by one: a tier of ten rows may load for no more
        check(answers, everything, expected)
        assert any(cached(answers))  # from the bucket: no two prompts begin alike
        engine.reset_prefix_cache()
        check(engine.generate(PROMPTS, concurrency=3), everything, expected)


def seed() -> int:
    drawn = int(os.environ.get("S3KV_SEED", random.SystemRandom().randrange(2**32)))
    print(f"S3KV_SEED={drawn}")
    return drawn


@pytest.mark.parametrize(
    "rounds",
    [
        pytest.param(1, marks=[pytest.mark.long, pytest.mark.timeout(600)]),
        pytest.param(8, marks=[pytest.mark.nightly, pytest.mark.timeout(3_600)]),
    ],
)
@pytest.mark.parametrize("front_end", ["connector", "tier"])
def test_an_engine_is_killed_and_the_next_is_right(rig: Rig, front_end: str, rounds: int) -> None:
    connector = changed(rig.patient, **FEW_SLOTS)
    if front_end == "tier":
        connector = with_few_rows(rig.s3, rig.bucket)
    expected = rig.reference(rig.tiny, PROMPTS, **FLOAT32)
    murder = Murder(rig.s3, rig.bucket, rig.tmp_path, seed())
    run(murder, rig.serve, rig.tiny, connector, expected, rounds=rounds)
