"""The tier's side of vLLM's interface; `test_tier_api` drives it under vLLM's own manager."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
from vllm.v1.kv_offload.tiering.base import TransferJob

from s3kv.connectors.offload_tier import S3Tier

KEY = make_offload_key(bytes(32), 1)


class BrokenPlanner:
    """A planner in which every call fails."""

    def __init__(self) -> None:
        self.counters = {"internal_errors": 0}
        self.retries = {"a": 1}

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("a bug")


@pytest.fixture
def broken() -> S3Tier:
    tier: Any = S3Tier.__new__(S3Tier)
    tier._may_load = tier._may_save = True
    tier._open, tier._salt = set(), b""
    tier.planner = BrokenPlanner()
    tier._tier = SimpleNamespace(client=SimpleNamespace(closed=0))
    tier._tier.client.close = lambda: setattr(tier._tier.client, "closed", 1)
    return tier  # type: ignore[no-any-return]


def job(number: int) -> TransferJob:
    rows = np.array([3], dtype=np.int32)
    return TransferJob(number, [KEY], rows, is_promotion=True, req_context=ReqContext("a"))


def test_a_bug_ends_every_job_once_after_the_process_and_the_rest_is_a_miss(
    broken: S3Tier, caplog: pytest.LogCaptureFixture
) -> None:
    context = ReqContext("a")
    broken.submit_load(job(1))
    assert broken._tier.client.closed  # nothing touches the rows any more
    broken.submit_store(job(2))
    results = list(broken.get_finished_jobs())
    assert sorted((r.job_id, r.success) for r in results) == [(1, False), (2, False)]
    assert not list(broken.get_finished_jobs())
    assert broken.lookup(KEY, context) is LookupResult.MISS
    broken.on_new_request(context)
    broken.drain_jobs()
    broken.on_request_finished(context)
    assert "please report it" in caplog.text


def test_a_key_is_that_of_another_chunk_after_a_reset(broken: S3Tier) -> None:
    assert broken._chunk(KEY) == (1, bytes(32))
    broken._salt = b"salt"
    group, block_hash = broken._chunk(KEY)
    assert (group, block_hash == bytes(32)) == (1, False)
