"""Our planner under vLLM's own scheduler: no request reads what is wrong or parks for ever, however
few blocks there are.

A request that waits for a load holds blocks. If one that holds none stood before it and did not
fit, it would keep the load from being taken in, and wait for its blocks: vllm#45388, vllm#57841.
From 0.31 on requests that hold blocks have a queue of their own, which comes first.
"""

from __future__ import annotations

import dataclasses
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.core.kv_cache_utils import get_group_id
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, SlidingWindowSpec

from lab import models
from s3kv.connectors import kv, kv_scheduler
from tests.contract.configurations import SHAPE
from tests.contract.scheduling import (
    BLOCK,
    CHUNK,
    FULL,
    Engine,
    Parked,
    configuration,
    lives,
    on_clock,
)
from tests.contract.test_kv_groups import STATE
from tests.mutants import Mutant, Patch
from tests.nightly import some_by_day
from tests.unit.planning import test_mutants as planning
from tests.unit.planning.oracle import FINDINGS
from tests.versions import since


@pytest.fixture(scope="module")
def engine_config(directory: Path) -> Any:
    return configuration(models.build(directory, models.TINY))


SEEDS = range(40)
STATES = dataclasses.replace(STATE, block_size=BLOCK)
WINDOW, SHORT = (
    SlidingWindowSpec(**SHAPE | {"block_size": BLOCK}, sliding_window=size) for size in (40, 10)
)
WIDE = dataclasses.replace(WINDOW, block_size=CHUNK)
LOCAL = ChunkedLocalAttentionSpec(**SHAPE | {"block_size": BLOCK}, attention_chunk_size=2 * CHUNK)


def draw_groups(rng: random.Random) -> list[Any]:
    """Specs of groups: one of full attention; beside states; or beside windows and local attention,
    also without it."""
    kinds = rng.choices([WINDOW, SHORT, rng.choice([WIDE, LOCAL])], k=2)  # vLLM has not both
    beside = rng.choice([[], [], [], [STATES, STATES], kinds, kinds])
    found = [*beside, *([FULL] * (beside is not kinds or rng.random() < 0.7))]
    rng.shuffle(found)
    return found


def draw_request(rng: random.Random, number: int, most: int) -> dict[str, Any]:
    """The arguments of `Engine.add`. Most requests share prefixes; some have limits."""
    new_tokens = rng.choice([1, 1, 3, 2 * BLOCK])
    tokens = rng.randint(1, most - new_tokens)
    tokens = rng.choice([tokens, tokens, tokens // CHUNK * CHUNK or tokens])
    fork = rng.choice([0, 2 * BLOCK, 5 * BLOCK, tokens])
    prompt = ([rng.randint(1, 2)] * fork + [rng.randint(3, 9)] * tokens)[:tokens]
    limits = rng.choice([{}] * 8 + [{"max_offload_tokens": 0}, {"max_load_tokens": 2 * BLOCK}])
    if limits.get("max_offload_tokens") == 0:
        prompt[0] = 100 + number
    return {"prompt": prompt, "new_tokens": new_tokens, "priority": rng.randint(0, 2), **limits}


def life(seed: int, vllm_config: Any, patch: Patch, *, faults: float = 0.0) -> Counter[str]:
    """Two engines after each other on one bucket, each with 30 requests, and the same for the same
    seed. faults: the share of steps that fail. Returns how often what happened."""
    rng = random.Random(seed)
    patch.setattr(kv_scheduler.secrets, "token_bytes", rng.randbytes)
    specs, ranks, resets = draw_groups(rng), rng.choice([1, 2]), rng.choice([0.0, 0.01])
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config
    settings = {
        # vLLM itself keeps blocks for good if it loses a step that was scheduled ahead.
        "async_scheduling": rng.random() < 0.5 and not faults,
        "max_num_seqs": rng.choice([2, 4, 16]),
        "max_num_scheduled_tokens": rng.choice([32, 100, 1_000]),
        "policy": rng.choice(["fcfs", "priority"]),
        "kv_load_failure_policy": rng.choice(["recompute", "fail"]),
        "kv_connector_extra_config": extra | {"max_wait_ms": rng.choice([500, 5_000])},
    }
    engine: Engine | None = None
    seen: Counter[str] = Counter()
    for _ in range(2):
        blocks, slots = rng.choice([8, 12, 20, 32]), rng.choice([4, 12, 40])
        sizes = {"blocks": blocks * len(specs), "slots": slots * len(specs), "ranks": ranks}
        failing = rng.choice([0.0, 0.2])
        engine = Engine(
            vllm_config, rng, before=engine, failing=failing, specs=specs, **sizes, **settings
        )
        on_clock(patch, engine)
        for number in range(30):
            engine.add(**draw_request(rng, number, blocks * BLOCK))
            for _ in range(rng.choice([0, 0, 1, 20])):
                engine.step(fails=rng.random() < faults)
                if rng.random() < resets:
                    engine.reset()
            if engine.unfinished and rng.random() < 0.2:
                loading = [name for kind, name in engine.ranks[0].orders if kind == "load"]
                engine.abort(rng.choice(loading or engine.unfinished))
            if engine.bucket.objects and rng.random() < 0.3:
                del engine.bucket.objects[rng.choice([*engine.bucket.objects])]
        engine.finish()
        engine.check()
        seen += engine.seen + engine.side.planner.counters
    return seen


HAPPENS = {"preempted", "loads_failed", "hit_tokens_host", "hit_tokens_bucket", "fetch_missing"}
HAPPENS |= {"resets", "evictions", "saves_dropped"}


@pytest.mark.parametrize("seeds", [SEEDS[:15], pytest.param(SEEDS[15:], marks=pytest.mark.long)])
def test_every_request_ends(seeds: range, engine_config: Any, monkeypatch: Patch) -> None:
    """And reads what it should, and no block, slot or lease stays."""
    seen = lives(life, seeds, engine_config, monkeypatch)
    assert set(seen) >= HAPPENS, f"never: {HAPPENS - set(seen)}"


@since(0, 33, "`KVOutputAggregator.ft_defer_kv_connector_outputs`")
def test_every_request_ends_if_steps_fail(engine_config: Any, monkeypatch: Patch) -> None:
    """vLLM passes on what the ranks report in such a step only with the reports of a later one."""
    assert lives(life, SEEDS[:8], engine_config, monkeypatch, faults=0.1)["failed steps"]


@pytest.mark.nightly
def test_every_request_ends_in_lives_nobody_has_seen(
    engine_config: Any, monkeypatch: Patch
) -> None:
    first = int(os.environ.get("S3KV_SEED", random.SystemRandom().randrange(2**40)))
    print(f"S3KV_SEED={first}")
    lives(life, range(first, first + 1_000), engine_config, monkeypatch)


@pytest.mark.long
@pytest.mark.parametrize("mutate", some_by_day(planning.MUTANTS + planning.LIVES, 8))
def test_it_is_noticed_that_a_planner(
    engine_config: Any, mutate: Mutant, monkeypatch: Patch
) -> None:
    mutate(monkeypatch)
    with pytest.raises(FINDINGS):
        lives(life, range(100), engine_config, monkeypatch)


def test_with_one_queue_for_both_some_lives_stop(engine_config: Any, monkeypatch: Patch) -> None:
    """So the tests before this one would find what 0.30 does: a request that is skipped keeps its
    place, whether it holds blocks or not."""
    monkeypatch.setattr(Scheduler, "_holds_kv_blocks", staticmethod(lambda request: False))
    with pytest.raises(Parked):
        lives(life, SEEDS, engine_config, monkeypatch)


def test_a_load_that_vllm_never_places_is_computed(engine_config: Any, monkeypatch: Patch) -> None:
    """For a load vLLM keeps the blocks of a speculative step free, which may be too many for the
    longest prompts. Computing needs none."""
    engine = Engine(engine_config, random.Random(1), blocks=9, slots=40)
    on_clock(monkeypatch, engine)
    monkeypatch.setattr(engine.scheduler, "_spec_decode_step_blocks", 2, raising=False)
    for prompt in ([*range(1, 140)], [7, *range(200, 338)], [*range(1, 140)]):
        engine.add(prompt)
        engine.finish()
    engine.check()


@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async"])
def test_blocks_that_vllm_has_hashed_and_nobody_computes_are_hit_by_nobody(
    engine_config: Any, ahead: bool, monkeypatch: Patch
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
    engine_config: Any, is_declared: bool, hit: int, monkeypatch: Patch
) -> None:
    """A connector that declares `supports_divergent_local_hybrid_hits` is asked only for tokens
    behind the blocks of full attention that vLLM has. There it has nothing, and vLLM computes the
    whole prompt. So ours declares no such thing: it is asked from the first token without a state.
    """
    name = "supports_divergent_local_hybrid_hits"
    if is_declared:
        monkeypatch.setattr(kv.S3KVConnector, name, True)
    specs = [FULL, STATES, STATES]
    engine = Engine(engine_config, random.Random(1), blocks=64, slots=64, specs=specs)
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
