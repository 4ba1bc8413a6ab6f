"""Our tier under vLLM's own scheduler: nothing is wrong, waits for ever, or stays."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from vllm.config import KVEventsConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler
from vllm.v1.kv_offload.base import make_offload_key

from lab import models
from s3kv.connectors import offload_tier
from tests.contract.configurations import configured
from tests.contract.offloading import OffloadingEngine
from tests.contract.scheduling import BLOCK, FULL, lives, on_clock
from tests.contract.test_scheduling import STATES, WINDOW, draw_groups
from tests.mutants import Mutant, Patch
from tests.system.sim import tier_mutants
from tests.system.sim.tier_engine import Key

SEEDS = range(100)
BROKEN = [
    mutant
    for mutant in tier_mutants.MUTANTS
    if mutant.__name__ not in ("does_not_wait_for_the_rows_at_a_reset", "believes_a_short_object")
]
"""All but those of the I/O process and its client, which are not there."""
HAPPENS = {"preempted", "loads", "resets", "fetch OK", "fetch MISSING", "fetch CANCELLED"}
HAPPENS |= {"fetch CORRUPT", "fetch FAILED", "upload OK", "upload FAILED", "use OK"}


@pytest.fixture(scope="module")
def engine_config(directory: Path) -> Any:
    return configured(
        models.build(directory, models.TINY),
        kv_transfer_config={"kv_connector": "OffloadingConnector", "kv_role": "kv_both"},
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
        block_size=BLOCK,
    )


def life(seed: int, vllm_config: Any, patch: Patch) -> Counter[str]:
    """Two engines after each other on one bucket, and the same for the same seed."""
    rng, seen = random.Random(seed), Counter[str]()
    engine: OffloadingEngine | None = None
    patch.setattr(offload_tier, "secrets", rng)
    patch.setattr(rng, "token_bytes", rng.randbytes, raising=False)
    patch.setattr(scheduler, "make_offload_key", lambda *of: Key(make_offload_key(*of)))
    ranks, specs = rng.choice([1, 2]), draw_groups(rng)
    chunk_blocks = rng.choice([1, 2] if all(spec in (FULL, STATES) for spec in specs) else [1])
    for resets in (0.0, rng.choice([0.0, 0.02])):
        blocks = rng.choice([8, 12, 20])
        engine = OffloadingEngine(
            vllm_config,
            rng,
            ranks=ranks,
            blocks=blocks * len(specs),
            slots=rng.choice([4, 12, 40]) * len(specs),
            specs=specs,
            chunk_blocks=chunk_blocks,
            before=engine,
            failing=rng.choice([0.0, 0.2]),
            max_wait_s=rng.choice([0.5, 5.0]),
            async_scheduling=rng.random() < 0.5,
            max_num_seqs=rng.choice([2, 4, 16]),
            max_num_scheduled_tokens=rng.choice([32, 100, 1_000]),
        )
        on_clock(patch, engine, offload_tier)
        for _ in range(20):
            new_tokens = rng.choice([1, 1, 3, BLOCK])
            tokens = rng.randint(1, blocks * BLOCK - new_tokens)
            fork = rng.choice([0, 2 * BLOCK, 5 * BLOCK, tokens])
            engine.add(([1] * fork + [rng.randint(2, 4)] * tokens)[:tokens], new_tokens=new_tokens)
            for _ in range(rng.choice([0, 0, 1, 20])):
                engine.step()
                if rng.random() < resets:
                    engine.reset()
            if engine.unfinished and rng.random() < 0.1:
                engine.abort(rng.choice(engine.unfinished))
        engine.finish()
        engine.check()
        seen += engine.seen
    return seen


@pytest.mark.parametrize("seeds", [SEEDS[:15], pytest.param(SEEDS[15:], marks=pytest.mark.long)])
def test_our_tier_under_vllms_scheduler(
    seeds: range, engine_config: Any, monkeypatch: Patch
) -> None:
    """Nothing that vLLM would not survive, either: its scheduler, manager and workers are real."""
    seen = lives(life, seeds, engine_config, monkeypatch)
    assert set(seen) >= HAPPENS, f"never: {HAPPENS - set(seen)}"


def test_chunks_of_several_blocks_beside_windows(engine_config: Any, monkeypatch: Patch) -> None:
    """vLLM stores them without the blocks that a window has left behind, and loads all of them.
    Once that is mended, this fails, and the tier need not refuse them any more."""
    monkeypatch.setattr(offload_tier, "check_rows_are_whole", lambda *_: None)
    sizes: Any = {"blocks": 40, "slots": 40, "ranks": 1, "chunk_blocks": 2, "max_wait_s": 5.0}
    engine = OffloadingEngine(engine_config, random.Random(0), specs=[FULL, WINDOW], **sizes)
    on_clock(monkeypatch, engine, offload_tier)
    prompt = [2] * 5 * BLOCK
    engine.add(prompt, max_offload_tokens=1)
    engine.finish()
    engine.add(prompt)  # hits the engine's own cache, which has the window's last blocks alone
    engine.finish()
    assert engine.scheduler.reset_prefix_cache()
    engine.add(prompt[: 2 * BLOCK + 1])
    with pytest.raises(AssertionError, match=r"None, and .* is read"):
        engine.finish()


@pytest.mark.parametrize("mutant", BROKEN, ids=lambda mutant: mutant.__name__)
def test_it_would_notice(mutant: Mutant, engine_config: Any, monkeypatch: Patch) -> None:
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        lives(life, SEEDS, engine_config, monkeypatch)
