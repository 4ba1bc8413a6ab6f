"""What stands in for a GPU lets another connector hit, and hit the right thing."""

from __future__ import annotations

from pathlib import Path

from benchmarks.peers import contenders
from benchmarks.peers.proof import faults
from benchmarks.rig import CHUNK_TOKENS
from lab.engine import Engine
from lab.models import prompts


def test_vllms_offloading_connector_hits_on_a_cpu(tiny: Path, tmp_path: Path) -> None:
    contender = contenders.offloading_fs(tmp_path, "run", host_gib=2)
    asks = prompts(3, 2 * CHUNK_TOKENS + 50, seed=3)
    with Engine(
        tiny, connector=contender.connector, log_path=tmp_path / "engine.log", env=contender.env
    ) as engine:
        engine.generate(asks)
        local = engine.generate(asks)
        engine.reset_prefix_cache()
        loaded = engine.generate(asks)
        hit_tokens = int(engine.metrics()["vllm:external_prefix_cache_hits_total"])
    assert [answer.cached_tokens for answer in local] == 3 * [2 * CHUNK_TOKENS]
    assert faults(loaded, local, hit_tokens) == []
    assert len(contender.saved()) == 6
    contender.forget()
    assert contender.saved() == {}
