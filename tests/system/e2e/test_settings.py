"""Settings that change what an engine does, or that it refuses, on the real engine.

What is refused before an engine is needed is in tests/unit/test_config.py and tests/contract.
"""

from __future__ import annotations

import shutil

import pytest

from lab import models
from lab.engine import Ask, Engine, EngineFailed
from s3kv.host.limits import memory_limits
from tests.system.e2e.conftest import Rig, answered, at_rest, cached, changed, tokens
from tests.system.e2e.test_failures import CHUNK_BYTES
from tests.waiting import wait_until

PROMPTS = models.prompts(2, 800)


@pytest.mark.long
def test_memory_that_ranks_do_not_have_together_stops_the_engine_at_start(rig: Rig) -> None:
    """Each rank alone would have it. None touches any."""
    host_bytes = memory_limits().available_bytes * 6 // 10
    engine = rig.launch(
        rig.tiny, changed(rig.patient, host_bytes=host_bytes), tensor_parallel_size=2
    )
    with pytest.raises(EngineFailed):
        engine.start()
    said = f"2 × {host_bytes:,} (host_bytes, per rank) = {2 * host_bytes:,}"
    assert said in engine.log_path.read_text()


@pytest.mark.long
def test_layers_with_a_window_are_served_in_one_group_if_vllm_keeps_them_whole(rig: Rig) -> None:
    """With vLLM's hybrid manager off. The reference has it on, and frees what is outside the
    windows; test_families.py has s3kv with it on. In float32: hit lengths do not matter."""
    hybrid = models.build(rig.models_dir, models.WINDOWED)
    asks = [Ask(prompt, max_tokens=40) for prompt in PROMPTS]
    expected = tokens(rig.reference.engine(hybrid, dtype="float32").generate(asks))
    one_group = {"disable_hybrid_kv_cache_manager": True, "dtype": "float32"}
    for hit in (0, 6 * 128):
        with rig.serve(hybrid, rig.patient, **one_group) as engine:
            answers = engine.generate(asks)
            at_rest(engine)
        assert answered(answers) == ([hit] * 2, expected)


def test_a_slab_smaller_than_a_prompt_serves_the_part_that_fits(rig: Rig) -> None:
    """Six chunks a prompt, three slots. In float32, where the length of a hit does not matter."""
    expected = rig.truth(PROMPTS)
    small = changed(rig.patient, host_bytes=3 * (CHUNK_BYTES + 2 * 4096))
    with rig.serve(rig.tiny, rig.patient, dtype="float32") as engine:
        engine.generate(PROMPTS[:1])
    with rig.serve(rig.tiny, small, dtype="float32") as engine:
        answers = engine.generate(PROMPTS)
        at_rest(engine)  # what has not been uploaded keeps its slot
        engine.reset_prefix_cache()
        answers += engine.generate(PROMPTS)
    assert tokens(answers) == expected * 2
    fits = 3 * 128
    # The second prompt was new: what of it was saved depends on how fast its uploads were.
    assert cached(answers)[:3] == [fits, 0, fits]
    assert cached(answers)[3] <= fits


def comparison(engine: Engine, beginning: str) -> str:
    """The line with which its namespace is compared. Nothing waits for it but this function."""

    def lines() -> list[str]:
        return [line for line in engine.log_path.read_text().splitlines() if beginning in line]

    wait_until("the namespace is compared", lines)
    return lines()[0]


@pytest.mark.long
def test_two_models_in_one_bucket_do_not_meet(rig: Rig) -> None:
    """Same shape, same prompts, same bucket and prefix; the weights differ. And the other way
    round: the same weights under another path are the same model when `model_id` says so."""
    first = models.build(rig.models_dir, models.TINY)
    second = models.build(rig.models_dir, models.TINY, seed=1)
    moved = rig.tmp_path / "moved"
    shutil.copytree(first, moved)
    with rig.serve(first, changed(rig.patient, model_id="first")) as engine:
        engine.generate(PROMPTS)
    with rig.serve(second, changed(rig.patient, model_id="second")) as engine:
        cold = engine.generate(PROMPTS)
        said = comparison(engine, "is new; ")
    assert "`s3kv ls --summary` shows the fields in which they differ" in said
    assert cached(cold) == [0, 0]
    with rig.serve(moved, changed(rig.patient, model_id="first")) as engine:
        warm = engine.generate(PROMPTS)
        assert comparison(engine, "is known, its manifest matches this engine's")
    expected = rig.reference(first, PROMPTS)
    assert cached(warm) == cached(expected) == [768, 768]
    assert tokens(warm) == tokens(expected)
    assert tokens(cold) != tokens(expected)
