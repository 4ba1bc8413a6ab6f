"""What the tier relies on of vLLM's tiers, held against the vLLM that is installed.

First names and fields, then the order of calls in a step; the hooks are in `test_vllm_api`.
`test_tier_cases` goes on from there.
"""

from __future__ import annotations

import dataclasses
import random
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.config import KVTransferConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)
from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from lab import models
from tests.contract.configurations import FULL, configured, groups
from tests.contract.test_vllm_api import find, moved, parameters
from tests.versions import VERSION

TIER = "s3kv/connectors/offload_tier.py"
BASE = "vllm.v1.kv_offload.base"
TIERING = "vllm.v1.kv_offload.tiering.base"
FACTORY = "vllm.v1.kv_offload.tiering.factory"
STATS = "vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics:OffloadingConnectorStats"

# Dataclass -> the fields we read or set, in vLLM's order where we give them by position (*).
FIELDS = {
    f"{TIERING}:TransferJob": "job_id keys chunk_ids is_promotion req_context",
    f"{TIERING}:JobResult": "* job_id success successful_keys transfer_time transfer_bytes",
    f"{BASE}:ReqContext": "req_id kv_transfer_params load_tier_filter",
    f"{BASE}:RequestOffloadingContext": "policy",
    f"{BASE}:OffloadingEvent": "* keys medium removed locality ownership",
    f"{BASE}:OffloadingKVEventsConfig": "enable_kv_cache_events",
    f"{BASE}:OffloadingCounterMetadata": "documentation labelnames",
    f"{BASE}:OffloadingGaugeMetadata": "documentation labelnames",
    f"{BASE}:OffloadingHistogramMetadata": "documentation labelnames buckets",
}
MEMBERS = {
    "LookupResult": "MISS HIT HIT_PENDING RETRY",
    "OffloadPolicy": "CHUNK_LEVEL REQUEST_LEVEL",
    "Medium": "CPU STORAGE",
    "Locality": "LOCAL REMOTE",
}
CALLS = {
    f"{FACTORY}:SecondaryTierFactory.register_tier": "tier_type module_path class_name",
    f"{BASE}:make_offload_key": "block_hash group_idx",
    f"{BASE}:ScheduleEndContext": "new_req_ids preempted_req_ids",
    f"{BASE}:ReqContext.get_offload_key_position": "key",
    f"{STATS}.increase_counter": "counter_name counter_increase_value labelvalues",
    f"{STATS}.set_gauge": "gauge_name gauge_value labelvalues",
    f"{STATS}.observe_histogram": "histogram_name histogram_value labelvalues",
    f"{TIERING}:SecondaryTierManager.__init__": "offloading_spec primary_kv_view tier_type "
    "backpressure_detector",
}


@pytest.mark.parametrize("name", FIELDS)
def test_fields_we_read(name: str) -> None:
    *in_order, wanted = FIELDS[name].rpartition("* ")
    there = [field.name for field in dataclasses.fields(find(*name.split(":")))]
    missing = set(wanted.split()) - set(there)
    assert not missing, moved(f"{name} has no {sorted(missing)}", TIER)
    if any(in_order):
        assert there[: len(wanted.split())] == wanted.split(), moved(f"{name}'s order", TIER)


@pytest.mark.parametrize("name", MEMBERS)
def test_members_we_use(name: str) -> None:
    there = {member.name for member in find(BASE, name)}
    assert there == set(MEMBERS[name].split()), moved(f"{name} has {sorted(there)}", TIER)


@pytest.mark.parametrize("name", CALLS)
def test_things_we_call(name: str) -> None:
    there = parameters(find(*name.split(":")))
    assert there == (*CALLS[name].split(),), moved(f"{name} has {there}", TIER)


def recorded_as(name: str, answer: Callable[..., Any] = lambda *_: None) -> Any:
    """A hook of `Recorder`."""

    def hook(self: Any, *args: Any) -> Any:
        self.calls.append(name)
        return answer(self, *args)

    return hook


def at_once(self: Any, job: Any) -> None:
    self.finished.append(JobResult(job.job_id, True))


class Recorder(SecondaryTierManager):  # type: ignore[misc]
    """A tier that has every chunk, and records what it is asked."""

    def __init__(self, **settings: Any) -> None:
        self.calls: list[str] = []
        self.settings = settings
        self.finished: list[JobResult] = []
        super().__init__(
            settings["offloading_spec"], settings["primary_kv_view"], settings["tier_type"]
        )

    def get_finished_jobs(self) -> list[JobResult]:
        self.calls.append("poll")
        finished, self.finished = self.finished, []
        return finished

    lookup = recorded_as("lookup", lambda *_: LookupResult.HIT)
    submit_store = recorded_as("store", at_once)
    submit_load = recorded_as("load", at_once)
    on_new_request = recorded_as("new request", lambda *_: base.RequestOffloadingContext())
    on_request_finished = recorded_as("request finished")
    serve_external_requests = recorded_as("external")
    on_schedule_end = recorded_as("step ends")
    drain_jobs = recorded_as("drain")


class Offloading:
    """vLLM's manager of the primary tier and others, driven as its scheduler does.
    rows: of the primary tier, each with one chunk of `tiny`. settings: of the engine, and its
    `role`, the `blocks` of a chunk, and another `cache` with as long pages. tier: the first."""

    TIMEOUT_S = 60.0

    def __init__(
        self, model: Path, *tiers: Mapping[str, Any], rows: int = 64, **settings: Any
    ) -> None:
        kv_cache_config = settings.pop("cache", None) or groups(FULL)
        blocks = settings.pop("blocks", 1)
        layers = max(len(group.layer_names) for group in kv_cache_config.kv_cache_groups)
        row_bytes = layers * blocks * FULL.page_size_bytes
        extra = {"cpu_bytes_to_use": rows * row_bytes, "secondary_tiers": [*map(dict, tiers)]}
        transfer = KVTransferConfig(
            kv_connector="OffloadingConnector",
            kv_role=settings.pop("role", "kv_both"),
            engine_id=uuid.uuid4().hex,
            kv_connector_extra_config=extra | {"blocks_per_chunk": blocks},
        )
        self.config = vllm_config = configured(model, kv_transfer_config=transfer, **settings)
        vllm_config.cache_config.mamba_cache_mode = "align"  # for a cache with states
        offloading = build_offloading_config(vllm_config, kv_cache_config)
        with set_current_vllm_config(vllm_config):
            self.spec = TieringOffloadingSpec(offloading)
            self.manager = self.spec.get_manager()
        assert self.spec.num_chunks == rows
        self.tier, *_ = self.tiers = self.manager.secondary_tiers

    def request(self, name: str = "") -> ReqContext:
        context = ReqContext(req_id=name or uuid.uuid4().hex)
        self.manager.on_new_request(context)
        return context

    def step(self) -> None:
        self.manager.on_schedule_end(base.ScheduleEndContext((), ()))

    def settle(self) -> None:
        """Step until no job is left."""
        self._until(lambda: not self.manager.has_pending_work())

    def reset(self) -> None:
        """As before new weights; no copy of the worker's is under way."""
        self.manager.reset_cache()
        if VERSION >= (0, 33):
            self.manager.on_reset_flushed()

    def store(self, chunks: Mapping[bytes, int]) -> None:
        """Have chunks, each filled with one number, and offer them to the tier."""
        context = self.request()
        prepared = self.manager.prepare_store(list(chunks), context)
        assert prepared.keys_to_store == list(chunks)
        for key, row in zip(chunks, prepared.store_spec.chunk_ids, strict=True):
            self._rows[row] = chunks[key]
        self.manager.complete_store(list(chunks), context)
        self.manager.on_request_finished(context)

    def look_up(self, keys: Sequence[bytes], context: ReqContext) -> list[LookupResult]:
        """Answers that are final, after as many steps as they take."""
        waits = {LookupResult.RETRY, LookupResult.HIT_PENDING}
        found: list[LookupResult] = []

        def final() -> bool:
            found[:] = [self.manager.lookup(key, context) for key in keys]
            return not waits & set(found)

        self._until(final)
        return found

    def read(self, key: bytes, context: ReqContext) -> int:
        """The number a chunk in the primary tier is filled with."""
        (row,) = self.manager.prepare_load([key], context).chunk_ids
        (number,) = set(self._rows[row].tolist())
        self.manager.complete_load([key], context)
        return number

    @property
    def _rows(self) -> Any:
        return np.asarray(self.tier._primary_kv_view)

    def _until(self, true: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + self.TIMEOUT_S
        while not true():
            assert time.monotonic() < deadline_s, "the tier never comes to an end"
            self.step()
            time.sleep(0.002)


HIT, MISS = LookupResult.HIT, LookupResult.MISS
RNG = random.Random(0)


def keys(count: int) -> list[bytes]:
    """New ones, of the only group."""
    return [make_offload_key(RNG.randbytes(32), 0) for _ in range(count)]


@pytest.fixture
def recorded(directory: Path) -> Iterator[Offloading]:
    settings = {"type": "Recorder", "module_path": __name__, "mine": 1}
    settings["backpressure"] = {"backpressure_cls": "EMABackpressureDetector"}
    offloading = Offloading(models.build(directory, models.TINY), settings, rows=16)
    yield offloading
    offloading.manager.shutdown()


def test_the_factory_keeps_what_is_its_own(recorded: Offloading) -> None:
    assert set(recorded.tier.settings) == {
        *("offloading_spec", "primary_kv_view", "tier_type", "backpressure_detector", "mine")
    }
    assert recorded.tier.tier_type == "Recorder"
    assert recorded.tier.locality is None


def test_the_order_of_a_step(recorded: Offloading) -> None:
    """Polled by the first lookup; loads are submitted once, before the end of the step."""
    calls = recorded.tier.calls
    context = recorded.request()
    for key in keys(2):
        assert recorded.manager.lookup(key, context) is LookupResult.HIT_PENDING
    recorded.step()
    assert calls == ["new request", "poll", "lookup", "lookup", "external", "load", "step ends"]
    calls.clear()
    recorded.step()
    recorded.step()
    assert calls == ["poll", "external", "step ends"] * 2


def test_the_order_of_a_store_and_a_reset(recorded: Offloading) -> None:
    calls = recorded.tier.calls
    recorded.store(dict.fromkeys(keys(2), 1))
    assert calls == ["new request", "poll", "store", "request finished"]
    calls.clear()
    recorded.manager.reset_cache()
    assert calls == ["drain", "poll"]


def test_a_row_is_allocated_at_a_hit_and_a_full_primary_tier_misses(recorded: Offloading) -> None:
    found = [recorded.manager.lookup(key, recorded.request()) for key in keys(17)]
    assert found == [LookupResult.HIT_PENDING] * 16 + [MISS]


def test_a_miss_ends_a_scan_from_the_front_which_an_earlier_retry_defers() -> None:
    """So the tier answers for a prompt that waits with two answers, and not with one per chunk."""
    answers = [LookupResult.HIT, LookupResult.RETRY, MISS]
    scheduler: Any = SimpleNamespace(
        manager=SimpleNamespace(lookup=lambda _key, _context: answers.pop(0)),
        _events_tracker=SimpleNamespace(record_lookup=lambda *_: None),
    )
    scan = OffloadingConnectorScheduler._maximal_prefix_lookup
    request: Any = None
    assert scan(scheduler, keys(9), ReqContext("a"), request, request, 0) is None
    assert not answers
