"""No request parks for ever in vLLM's scheduler, however few blocks there are.

A request that waits for a load holds blocks. If one that holds none stood before it and did not
fit, it would keep the load from being taken in, and wait for its blocks: vllm#45388, vllm#57841.
From 0.31 on requests that hold blocks have a queue of their own, which comes first.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.core.sched.scheduler import Scheduler

from lab import models
from s3kv.connectors import kv
from tests.contract.scheduling import BLOCK, Engine, Parked, configuration, on_clock


@pytest.fixture(autouse=True)
def log_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connector has its lines printed by vLLM, for as long as the process lives."""
    monkeypatch.setattr(kv, "join_vllm_log", lambda: None)


@pytest.fixture(scope="module")
def engine_config(directory: Path) -> Any:
    return configuration(models.build(directory, models.TINY))


both = pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async"])


def one_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """What 0.30 does: a request that is skipped keeps its place, whether it holds blocks or not."""
    monkeypatch.setattr(Scheduler, "_holds_kv_blocks", staticmethod(lambda request: False))


SEEDS = range(24)


def life(
    vllm_config: Any, seed: int, monkeypatch: pytest.MonkeyPatch, *, ahead: bool
) -> Counter[str]:
    """Two engines after each other on one bucket, each with 30 requests, and the same for the same
    seed. Returns how often what happened."""
    rng = random.Random(seed)
    settings = {
        "async_scheduling": ahead,
        "max_num_seqs": rng.choice([2, 4, 16]),
        "max_num_scheduled_tokens": rng.choice([32, 100, 1_000]),
        "policy": rng.choice(["fcfs", "priority"]),
        "kv_load_failure_policy": rng.choice(["recompute", "fail"]),
    }
    engine: Engine | None = None
    seen: Counter[str] = Counter()
    for _ in range(2):
        blocks, slots = rng.choice([8, 12, 20, 32]), rng.choice([4, 12, 40])
        failing = rng.choice([0.0, 0.2])
        engine = Engine(
            vllm_config, rng, blocks=blocks, slots=slots, before=engine, failing=failing, **settings
        )
        on_clock(monkeypatch, engine)
        for _ in range(30):
            new_tokens = rng.choice([1, 1, 3, 2 * BLOCK])
            tokens = rng.randint(1, blocks * BLOCK - new_tokens)
            fork = rng.choice([0, 2 * BLOCK, 5 * BLOCK, tokens])
            prompt = ([rng.randint(1, 2)] * fork + [rng.randint(3, 9)] * tokens)[:tokens]
            engine.add(prompt, new_tokens=new_tokens, priority=rng.randint(0, 2))
            for _ in range(rng.choice([0, 0, 1, 20])):
                engine.step()
            if engine.unfinished and rng.random() < 0.1:
                engine.abort(rng.choice(engine.unfinished))
        engine.finish()
        engine.check()
        seen += engine.seen + engine.side.planner.counters
    return seen


HAPPENS = {"preempted", "loads_failed", "hit_tokens_host", "hit_tokens_bucket", "fetch_missing"}


@both
def test_every_request_ends(
    engine_config: Any, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: Counter[str] = Counter()
    for seed in SEEDS:
        try:
            seen += life(engine_config, seed, monkeypatch, ahead=ahead)
        except AssertionError as error:
            pytest.fail(f"seed {seed}: {error}")
    assert set(seen) >= HAPPENS, f"never: {HAPPENS - set(seen)}"


@both
def test_with_one_queue_for_both_some_lives_stop(
    engine_config: Any, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the test before this one would find it."""
    one_queue(monkeypatch)
    parked = 0
    for seed in SEEDS[:8]:
        try:
            life(engine_config, seed, monkeypatch, ahead=ahead)
        except Parked:
            parked += 1
    assert parked
