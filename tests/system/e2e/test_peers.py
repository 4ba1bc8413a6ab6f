"""What stands in for a GPU lets another connector hit, and hit the right thing."""

from __future__ import annotations

import pytest

from benchmarks.peers import contenders
from benchmarks.peers.proof import faults
from benchmarks.rig import CHUNK_TOKENS, Store
from lab.engine import Engine
from lab.models import prompts
from tests.system.e2e.conftest import Rig


@pytest.mark.parametrize("tier", ["fs", pytest.param("s3kv", marks=pytest.mark.nightly)])
def test_vllms_offloading_connector_hits_on_a_cpu(rig: Rig, tier: str) -> None:
    if tier == "fs":
        contender = contenders.offloading_fs(rig.tmp_path, "run")
    else:
        store = Store("moto", rig.s3.url, rig.bucket, rig.s3.env)
        contender = contenders.offloading_s3kv(store, "run")
    asks = prompts(3, 2 * CHUNK_TOKENS + 50, seed=3)
    env = {**rig.s3.env, **contender.env}
    with Engine(
        rig.tiny, connector=contender.connector, log_path=rig.tmp_path / "engine.log", env=env
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
