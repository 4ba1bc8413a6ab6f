"""What s3kv serves and refuses, told by vLLM's own configuration objects."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import KVTransferConfig, PoolerConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

from lab import models
from s3kv.config import Config
from s3kv.connectors import S3KVConnector
from s3kv.connectors.kv_translate import (
    KVGeometry,
    check_supported,
    geometry,
    scheduled_requests,
    writes_around_fences,
    written_blocks,
)
from s3kv.connectors.tier_setup import check_requests_are_known
from s3kv.errors import ConfigError, UnsupportedError
from s3kv.planning.group_kinds import Coverage, SlidingWindow, States
from tests.contract.configurations import BLOCK_TOKENS, FULL, SIZES, configured, groups
from tests.contract.test_kv import TRANSFER


@pytest.mark.parametrize("algo", ["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"])
def test_hashes_by_xxh3_need_a_seed_and_are_warned_of(
    tiny_config: Any, algo: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    weak = algo.startswith("xxhash")
    monkeypatch.setattr(tiny_config.cache_config, "prefix_caching_hash_algo", algo)
    monkeypatch.setattr(tiny_config, "kv_transfer_config", KVTransferConfig(**TRANSFER))
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(ConfigError, match=f"'{algo}'.*SEED") if weak else contextlib.nullcontext():
        check_supported(tiny_config, groups(FULL))
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    S3KVConnector(tiny_config, KVConnectorRole.SCHEDULER, groups(FULL))
    check_requests_are_known(Config(bucket="bucket"), tiny_config, groups(FULL))
    assert caplog.text.count("use sha256 or sha256_cbor") == 2 * weak, "connector and tier"


@pytest.mark.parametrize(
    "engine",
    [
        (2, True, {}, ""),
        (2, True, {"all2all_backend": "nixl_ep"}, "rank"),
        (1, True, {"all2all_backend": "nixl_ep"}, ""),
        (2, False, {"all2all_backend": "nixl_ep"}, ""),
        (1, True, {"enable_return_routed_experts": True}, "routed-experts.*Run it without s3kv$"),
    ],
)
def test_experts_that_may_leave_out_a_rank_or_are_returned_are_refused(
    engine: tuple[int, bool, dict[str, Any], str], tiny_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM looks for the rank once the step has been saved (`check_ep_fault` of its runners). It
    returns the experts of the tokens that it has computed, and fails without one's."""
    ranks, experts, settings, reason = engine
    for name, value in {"data_parallel_size": ranks, **settings}.items():
        owner = "aux_output_config" if "routed" in name else "parallel_config"
        monkeypatch.setattr(getattr(tiny_config, owner), name, value)
    monkeypatch.setattr(type(tiny_config.model_config), "is_moe", experts)
    check_both(tiny_config, groups(FULL), reason)


def test_a_plan_is_lost_with_the_step_of_an_engine_that_tolerates_faults(
    tiny_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny_config.parallel_config, "enable_fault_tolerance", True)
    with pytest.raises(UnsupportedError, match="enable_fault_tolerance cannot be served"):
        check_supported(tiny_config, groups(FULL))


def check_both(vllm_config: Any, cache: Any, reason: str) -> None:
    """The connector and the tier refuse an engine for this reason, if there is one."""
    for check in (
        lambda: check_supported(vllm_config, cache),
        lambda: check_requests_are_known(Config(bucket="bucket"), vllm_config, cache),
    ):
        with pytest.raises(UnsupportedError, match=reason) if reason else contextlib.nullcontext():
            check()


@pytest.mark.parametrize(
    ("spec", "pooling", "reason"),
    [
        (FULL, None, ""),
        (FULL, "LAST", ""),
        (dataclasses.replace(FULL, non_causal=True), None, "attend to later ones"),
        (FULL, "MEAN", r"first token .*\(MEAN\)"),
        (FULL, "CLS", r"first token .*\(CLS\)"),
    ],
)
def test_models_that_need_whole_prompts_are_refused(
    spec: Any, pooling: Any, reason: str, tiny_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM turns its own prefix cache off for them, and asks its connectors all the same."""
    pooler = pooling and PoolerConfig(seq_pooling_type=pooling)
    monkeypatch.setattr(tiny_config.model_config, "pooler_config", pooler)
    check_both(tiny_config, groups(spec), reason and f"{reason}.*Run it without s3kv$")


@pytest.mark.parametrize(("block", "chunk"), [(32, 256), (96, 288), (384, 384), (1024, 1024)])
def test_a_chunk_is_about_256_tokens_by_default(directory: Path, block: int, chunk: int) -> None:
    vllm_config = configured(models.build(directory, models.TINY), block_size=block)
    cache = groups(dataclasses.replace(FULL, block_size=block))
    sizes = geometry(Config(bucket="kv-cache"), vllm_config, cache)
    assert (sizes.block_tokens, sizes.chunk_tokens) == (block, chunk)


MIXED = UniformTypeKVCacheSpecs(
    block_size=BLOCK_TOKENS,
    kv_cache_specs={"a": FULL, "b": dataclasses.replace(FULL, dtype=torch.float32)},
)


@pytest.mark.parametrize(
    ("spec", "hash_tokens", "writes"),
    [(FULL, BLOCK_TOKENS, False), (MIXED, BLOCK_TOKENS, True), (FULL, 64, True)],
)
@pytest.mark.parametrize("second_runner", [False, True])
def test_which_steps_write_before_their_forward(
    second_runner: bool, spec: Any, hash_tokens: int, writes: bool
) -> None:
    vllm_config: Any = SimpleNamespace(use_v2_model_runner=second_runner)
    sizes = KVGeometry(BLOCK_TOKENS, hash_tokens, 2 * BLOCK_TOKENS, ())
    step = vllm_config, groups(spec), sizes
    assert writes_around_fences(*step) == (writes and second_runner, writes and not second_runner)


WINDOWS = KVGeometry(
    16, 16, 32, (Coverage(16, 32, members=(1,)), Coverage(16, 32, SlidingWindow(20), 1, (0,)))
)


def step(block_ids: tuple[list[int], ...], tokens: int, **states: Any) -> Any:
    """A step of a new request, with what vLLM says of blocks in it."""
    cached = dict.fromkeys(("req_ids", "new_block_ids", "num_computed_tokens"), ())
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id="new", block_ids=block_ids, num_computed_tokens=0)
        ],
        scheduled_cached_reqs=SimpleNamespace(**cached, resumed_req_ids=set()),
        num_scheduled_tokens={"new": tokens},
        kv_connector_block_state=SimpleNamespace(**states),
    )


def test_the_tables_of_a_step_are_asked_for_only_with_several_groups() -> None:
    """A new request, and one that goes on without a new block in any group."""
    asked: list[str] = []

    def tables(request_id: str) -> tuple[list[int], ...]:
        asked.append(request_id)
        return [0, 7], [5, 6]

    output = step(([8], [9]), 16, get_block_ids=tables)
    output.scheduled_cached_reqs = SimpleNamespace(
        req_ids=["old"], new_block_ids=[None], num_computed_tokens=[31], resumed_req_ids=set()
    )
    output.num_scheduled_tokens["old"] = 1
    new, old = scheduled_requests(output, WINDOWS)
    assert (new.block_ids, new.replaces, new.scheduled_tokens) == (([8], [9]), True, 16)
    assert (old.block_ids, old.replaces, old.computed_tokens) == ((), False, 31)
    assert asked == []
    assert old.tables() == ([0, 7], [5, 6])
    assert asked == ["old"]
    assert [r.tables for r in scheduled_requests(output, SIZES)] == [None, None]


STATES = KVGeometry(
    16, 16, 32, (Coverage(16, 32, members=(0,)), Coverage(16, 32, States(), 1, (1, 2)))
)


@pytest.mark.parametrize(
    ("told", "known"),
    [
        ([(1, 12, 32), (2, 22, 32)], [32]),
        ([(1, 12, 32)], []),
        ([(1, 12, 32), (2, 29, 32)], []),
        ([(1, 12, 24), (2, 22, 24)], []),
    ],
    ids=["all", "one group", "another block", "within a block"],
)
def test_the_states_that_a_step_writes_before_its_end_are_known(
    told: list[tuple[int, int, int]], known: list[int]
) -> None:
    tables = {"new": ([1, 2, 3], [0, 12, 13], [0, 22, 23])}
    offloads = {"new": told, "not in this step": told}
    states = {"get_block_ids": tables.get, "boundary_state_offloads": offloads}
    (new,) = scheduled_requests(step(tables["new"], 40, **states), STATES)
    assert list(new.states) == known


def test_the_blocks_that_a_step_zeroes_or_copies_to_are_known() -> None:
    copies = [SimpleNamespace(src_block_id=1, dst_block_id=2)]
    step: Any = SimpleNamespace(kv_cache_block_copies=copies, new_block_ids_to_zero=[3, 4])
    assert written_blocks(step) == ({2, 3, 4}, {2})
    step = SimpleNamespace(kv_cache_block_copies=None, new_block_ids_to_zero=None)
    assert written_blocks(step) == (set(), set())
