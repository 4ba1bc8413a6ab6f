"""The tier's side of vLLM's interface, and every fault of the suite under a tier, with vLLM's own
manager and a real I/O process; `test_tier_api` has what they rely on.

In each case of a fault: a lookup comes to an answer, and a hit has the bytes that were stored;
stores, a reset and a shutdown come to an end; and when it is over the bucket is of use again.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
from vllm.v1.kv_offload.tiering.base import TransferJob

from lab import models
from lab.constants import changed
from lab.faults import Fault
from lab.proxy import Proxy, plain_and_tls
from lab.s3 import S3Server, moto_process
from s3kv.connectors.offload_tier import S3Tier
from s3kv.connectors.plugin import register
from tests.contract.test_tier_api import HIT, MISS, Offloading, keys
from tests.servers import set_credentials
from tests.system.faults.cases import CASES, Case
from tests.system.faults.life import CONSTANTS

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


BUCKET = "faults"
STRUCK = {name: case for name, case in CASES.items() if case.fault is not None}
LONG = STRUCK.keys() - {"refuse", "flipped-payload"}
RECOVERS_S = 60.0


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with moto_process() as found, pytest.MonkeyPatch.context() as patch:
        found.client().create_bucket(Bucket=BUCKET)
        set_credentials(patch, {k: v for k, v in found.env.items() if "KEY" in k})
        yield found


@pytest.fixture(scope="module")
def start(
    server: S3Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Offloading]]:
    """Engines with one model and one bucket."""
    register()
    model = models.build(tmp_path_factory.mktemp("model"), models.TINY)
    settings = {"type": "s3kv", "bucket": BUCKET, "region": "us-east-1", "on_unavailable": "serve"}
    settings |= {"request_timeout_ms": 1_000, "max_wait_ms": 2_000, "drain_timeout_s": 0.5}

    def one(url: str | None, **more: Any) -> Offloading:
        return Offloading(model, settings | {"endpoint_url": url} | more)

    with changed(**CONSTANTS, miss_ttl_s=0.01):
        yield one


@pytest.fixture(scope="module")
def direct(server: S3Server, start: Callable[..., Offloading]) -> Iterator[Offloading]:
    """An engine that no fault strikes."""
    engine = start(server.url)
    yield engine
    engine.manager.shutdown()


@pytest.fixture(scope="module")
def proxies(server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    with plain_and_tls(str(server.url), tmp_path_factory.mktemp("tls")) as found:
        yield found


def stored(engine: Offloading, number: int) -> list[bytes]:
    chunks = keys(2)
    engine.store(dict.fromkeys(chunks, number))
    engine.settle()
    return chunks


def hits(engine: Offloading, chunks: list[bytes], number: int) -> int:
    """Number of the chunks that are found. Whatever is found is right."""
    context = engine.request()
    found = engine.look_up(chunks, context)
    assert set(found) <= {HIT, MISS}
    right = [engine.read(k, context) for k, f in zip(chunks, found, strict=True) if f is HIT]
    assert set(right) <= {number}
    engine.manager.on_request_finished(context)
    return len(right)


def begin(engine: Offloading, chunks: list[bytes]) -> ReqContext:
    """A request with these chunks' fetches under way, and a store of others."""
    context = engine.request()
    for key in chunks:
        engine.manager.lookup(key, context)
    engine.step()
    engine.store(dict.fromkeys(keys(2), 4))
    return context


def recovered(engine: Offloading, direct: Offloading) -> None:
    deadline_s = time.monotonic() + RECOVERS_S
    while hits(engine, stored(direct, 5), 5) < 2:
        assert time.monotonic() < deadline_s, "the bucket is never of use again"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long][: name in LONG]) for name in STRUCK]
)
def test_every_moment_of_a_tier_comes_to_an_end(
    name: str, start: Callable[..., Offloading], direct: Offloading, proxies: dict[str, Any]
) -> None:
    case: Case = STRUCK[name]
    between: Proxy = proxies[case.scheme]
    bundle = {"ca_bundle": proxies["ca_bundle"]} if case.scheme == "https" else {}
    between.lift()
    engine = start(between.url, **bundle)
    try:
        chunks = stored(direct, 3)
        between.fault(dataclasses.replace(case.fault, verbs=("GET",)))
        assert hits(engine, chunks, 3) == 2 * (case.fetch == "fetch_ok")
        between.lift()
        recovered(engine, direct)

        between.fault(dataclasses.replace(case.fault, verbs=("PUT",)))
        chunks = stored(engine, 4)
        between.lift()
        found = hits(direct, chunks, 4)  # a body that was damaged on its way is refused by readers
        assert found == 2 or (case.fetch, case.upload) != ("fetch_ok", "upload_ok")
        recovered(engine, direct)

        between.fault(case.fault)
        begin(engine, stored(direct, 6))
        engine.reset()
        assert not engine.manager.has_pending_work()
        begin(engine, stored(direct, 6))
        process = Path(f"/proc/{engine.tier._tier.client.pid}")
    finally:
        engine.manager.shutdown()
        engine.tier.shutdown()
        between.lift()
    assert not process.exists()


@pytest.mark.parametrize("then", ["looked up", "without name", "reset", "shut down"])
def test_an_io_process_that_is_killed_in_mid_transfer(
    then: str, start: Callable[..., Offloading], direct: Offloading, proxies: dict[str, Any]
) -> None:
    """All but the first without a name of the rows: whoever cleans /dev/shm takes that, and not the
    memory, which the next I/O process maps, too."""
    between: Proxy = proxies["http"]
    between.lift()
    engine = start(between.url, max_wait_ms=60_000, request_timeout_ms=60_000)
    try:
        chunks = stored(direct, 3)
        struck = between.statistics().faults.get("black_hole", 0)
        between.fault(Fault(kind="black_hole"))
        context = begin(engine, chunks)
        between.wait_for("black_hole", struck + 2)
        if then != "looked up":
            Path(engine.manager.primary_tier._mmap_region.mmap_path).unlink()
        os.kill(engine.tier._tier.client.pid, signal.SIGKILL)
        if then == "shut down":
            return
        if then == "reset":
            engine.reset()
        assert engine.look_up(chunks, context) == [MISS] * 2
        engine.settle()
        between.lift()
        if then == "reset":  # what others store is out of its reach
            assert hits(engine, stored(engine, 9), 9) == 2
            return
        recovered(engine, direct)
        assert hits(direct, stored(engine, 9), 9) == 2
    finally:
        engine.manager.shutdown()
