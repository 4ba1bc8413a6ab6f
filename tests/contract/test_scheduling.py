"""No request parks for ever in vLLM's scheduler, however few blocks there are.

A request that waits for a load holds blocks. If one that holds none stood before it and did not
fit, it would keep the load from being taken in, and wait for its blocks: vllm#45388, vllm#57841.
From 0.31 on requests that hold blocks have a queue of their own, which comes first.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.core.kv_cache_utils import get_group_id
from vllm.v1.core.sched.scheduler import Scheduler

from lab import models
from s3kv.connectors import kv
from tests.contract.scheduling import BLOCK, Engine, Parked, configuration, on_clock
from tests.contract.test_kv_groups import STATE
from tests.versions import since


@pytest.fixture(scope="module")
def engine_config(directory: Path) -> Any:
    return configuration(models.build(directory, models.TINY))


SEEDS = range(24)
both = pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async"])


def life(
    vllm_config: Any,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
    *,
    ahead: bool,
    ranks: int = 1,
    faults: float = 0.0,
) -> Counter[str]:
    """Two engines after each other on one bucket, each with 30 requests, and the same for the same
    seed. faults: the share of steps that fail. Returns how often what happened."""
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
        sizes = {"blocks": blocks, "slots": slots, "ranks": ranks}
        failing = rng.choice([0.0, 0.2])
        engine = Engine(vllm_config, rng, before=engine, failing=failing, **sizes, **settings)
        on_clock(monkeypatch, engine)
        for _ in range(30):
            new_tokens = rng.choice([1, 1, 3, 2 * BLOCK])
            tokens = rng.randint(1, blocks * BLOCK - new_tokens)
            fork = rng.choice([0, 2 * BLOCK, 5 * BLOCK, tokens])
            prompt = ([rng.randint(1, 2)] * fork + [rng.randint(3, 9)] * tokens)[:tokens]
            engine.add(prompt, new_tokens=new_tokens, priority=rng.randint(0, 2))
            for _ in range(rng.choice([0, 0, 1, 20])):
                engine.step(fails=rng.random() < faults)
            if engine.unfinished and rng.random() < 0.1:
                engine.abort(rng.choice(engine.unfinished))
        engine.finish()
        engine.check()
        seen += engine.seen + engine.side.planner.counters
    return seen


HAPPENS = {"preempted", "loads_failed", "hit_tokens_host", "hit_tokens_bucket", "fetch_missing"}


@pytest.mark.parametrize(
    ("ahead", "ranks", "faults"),
    [
        pytest.param(False, 1, 0.0, id="sync"),
        pytest.param(True, 1, 0.0, id="async"),
        # vLLM itself keeps blocks for good if it loses a step that was scheduled ahead.
        pytest.param(
            *(False, 2, 0.1),
            id="steps fail",
            marks=since(0, 33, "`KVOutputAggregator.ft_defer_kv_connector_outputs`"),
        ),
    ],
)
def test_every_request_ends(
    engine_config: Any, ahead: bool, ranks: int, faults: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no block, slot or lease stays, although vLLM passes on what the ranks report in a step
    that fails only with the reports of a later one."""
    seen: Counter[str] = Counter()
    for seed in SEEDS[:8] if faults else SEEDS:
        how: dict[str, Any] = {"ahead": ahead, "ranks": ranks, "faults": faults}
        try:
            seen += life(engine_config, seed, monkeypatch, **how)
        except AssertionError as error:
            pytest.fail(f"seed {seed}: {error}")
    happens = HAPPENS | ({"failed steps"} if faults else set())
    assert set(seen) >= happens, f"never: {happens - set(seen)}"


@both
def test_with_one_queue_for_both_some_lives_stop(
    engine_config: Any, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the test before this one would find what 0.30 does: a request that is skipped keeps its
    place, whether it holds blocks or not."""
    monkeypatch.setattr(Scheduler, "_holds_kv_blocks", staticmethod(lambda request: False))
    parked = 0
    for seed in SEEDS[:8]:
        try:
            life(engine_config, seed, monkeypatch, ahead=ahead)
        except Parked:
            parked += 1
    assert parked


def test_a_load_that_vllm_never_places_is_computed(
    engine_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a load vLLM keeps the blocks of a speculative step free, which may be too many for the
    longest prompts. Computing needs none."""
    engine = Engine(engine_config, random.Random(1), blocks=9, slots=40)
    on_clock(monkeypatch, engine)
    monkeypatch.setattr(engine.scheduler, "_spec_decode_step_blocks", 2, raising=False)
    for prompt in ([*range(1, 140)], [7, *range(200, 338)], [*range(1, 140)]):
        engine.add(prompt)
        engine.finish()
    engine.check()


@both
def test_blocks_that_vllm_has_hashed_and_nobody_computes_are_hit_by_nobody(
    engine_config: Any, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request is scheduled, and preempted in the same pass for one that is more urgent."""
    settings = {"policy": "priority", "long_prefill_token_threshold": 20, "max_num_seqs": 4}
    settings |= {"async_scheduling": ahead, "max_num_scheduled_tokens": 36}
    engine = Engine(engine_config, random.Random(1), blocks=6, slots=40, **settings)
    on_clock(monkeypatch, engine)
    engine.add([1] * 90, priority=5)
    while not engine.step():
        pass
    engine.add([2] * 16, new_tokens=4, priority=0)
    engine.finish()
    assert engine.seen["preempted"]
    engine.check()


@pytest.mark.parametrize(("is_declared", "hit"), [(False, 96), (True, 0)])
def test_a_request_whose_states_vllm_has_evicted_is_loaded_whole(
    engine_config: Any, is_declared: bool, hit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connector that declares `supports_divergent_local_hybrid_hits` is asked only for tokens
    behind the blocks of full attention that vLLM has. There it has nothing, and vLLM computes the
    whole prompt. So ours declares no such thing: it is asked from the first token without a state.
    """
    name = "supports_divergent_local_hybrid_hits"
    if is_declared:
        monkeypatch.setattr(kv.S3KVConnector, name, True)
    monkeypatch.setattr(engine_config.cache_config, "mamba_cache_mode", "align")
    states = [dataclasses.replace(STATE, block_size=BLOCK)] * 2
    engine = Engine(engine_config, random.Random(1), blocks=64, slots=64, states=states)
    on_clock(monkeypatch, engine)
    assert getattr(engine.connector, name) is is_declared
    prompt = [*range(1, 101)]
    engine.add(prompt)
    engine.finish()
    pool = engine.scheduler.kv_cache_manager.block_pool
    cached = [block for block in pool.blocks if block.block_hash is not None]
    pool.evict_blocks({b.block_id for b in cached if get_group_id(b.block_hash) > 0})
    engine.add(prompt)
    engine.finish()
    engine.check()
    assert engine.side.planner.counters["hit_tokens_host"] == hit
