"""What the tier relies on of vLLM's tiers, held against the vLLM that is installed.

First names and fields, then the order of calls in a step, then a suite for a tier under vLLM's own
TieringOffloadingManager: the tier `fs` shows that the suite asks for nothing of ours alone.
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
from vllm.v1.kv_offload.base import (
    LookupResult,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from lab import models
from lab.constants import changed
from lab.s3 import S3Server
from s3kv.connectors.offload_tier import S3Tier
from s3kv.connectors.plugin import register
from s3kv.errors import ConfigError
from tests.contract.configurations import FULL, configured, groups
from tests.contract.test_vllm_api import find, moved, parameters
from tests.servers import BUCKET, KEYS, REGION, moto_server
from tests.versions import VERSION

TIER = "s3kv/connectors/offload_tier.py"
BASE = "vllm.v1.kv_offload.base"
TIERING = "vllm.v1.kv_offload.tiering.base"
FACTORY = "vllm.v1.kv_offload.tiering.factory"
CONFIG = "vllm.v1.kv_offload.config"

FIELDS: list[tuple[str, str, set[str]]] = [
    (TIERING, "TransferJob", {"job_id", "keys", "chunk_ids", "is_promotion", "req_context"}),
    (
        TIERING,
        "JobResult",
        {"job_id", "success", "successful_keys", "transfer_time", "transfer_bytes"},
    ),
    (BASE, "ReqContext", {"req_id", "kv_transfer_params"}),
    (BASE, "RequestOffloadingContext", {"policy"}),
    (
        CONFIG,
        "OffloadingConfig",
        {"groups", "engine_id", "model", "cache", "parallel", "extra_config", "canonical_layout"},
    ),
    (CONFIG, "OffloadingGroupConfig", {"tokens_per_block", "layer_names", "group_id"}),
    (CONFIG, "OffloadingCacheConfig", {"tokens_per_hash", "blocks_per_chunk"}),
    (
        CONFIG,
        "OffloadingParallelConfig",
        {"rank", "world_size", "tp_size", "pp_size", "is_parallelism_agnostic"},
    ),
]
MEMBERS: list[tuple[str, set[str]]] = [
    ("LookupResult", {"MISS", "HIT", "HIT_PENDING", "RETRY"}),
    ("OffloadPolicy", {"CHUNK_LEVEL", "REQUEST_LEVEL"}),
    ("Medium", {"CPU", "STORAGE"}),
]
CALLS: list[tuple[str, str, tuple[str, ...]]] = [
    (FACTORY, "SecondaryTierFactory.register_tier", ("tier_type", "module_path", "class_name")),
    (BASE, "make_offload_key", ("block_hash", "group_idx")),
    (BASE, "get_offload_block_hash", ("key",)),
    (BASE, "get_offload_group_idx", ("key",)),
]
# Newer hooks, which a tier need not have.
NEWER_HOOKS = {"config_info_keys", "config_info"}
HOOKS: dict[str, tuple[str, ...]] = {
    "lookup": ("key", "req_context"),
    "submit_store": ("job_metadata",),
    "submit_load": ("job_metadata",),
    "get_finished_jobs": (),
    "on_new_request": ("req_context",),
    "drain_jobs": (),
    "has_pending_work": (),
    "take_events": (),
    "touch": ("keys", "req_context"),
    "on_request_finished": ("req_context",),
    "serve_external_requests": ("parent",),
    "on_schedule_end": ("context",),
    "shutdown": (),
    "get_stats": (),
    "build_metric_definitions": ("extra_config",),
}
ABSTRACT = {
    *("lookup", "submit_store", "submit_load", "get_finished_jobs"),
    *("on_new_request", "drain_jobs"),
}


@pytest.mark.parametrize(("module", "name", "wanted"), FIELDS)
def test_fields_we_read(module: str, name: str, wanted: set[str]) -> None:
    missing = wanted - {field.name for field in dataclasses.fields(find(module, name))}
    assert not missing, moved(f"{name} has no {sorted(missing)}", TIER)


def test_the_context_of_a_step() -> None:
    assert ScheduleEndContext._fields == ("new_req_ids", "preempted_req_ids"), moved(
        "ScheduleEndContext has other fields", TIER
    )


@pytest.mark.parametrize(("name", "wanted"), MEMBERS)
def test_members_we_use(name: str, wanted: set[str]) -> None:
    there = {member.name for member in find(BASE, name)}
    assert there == wanted, moved(f"{name} has {sorted(there)}", TIER)


@pytest.mark.parametrize(("module", "path", "expected"), CALLS)
def test_things_we_call(module: str, path: str, expected: tuple[str, ...]) -> None:
    assert parameters(find(module, path)) == expected, moved(f"{path} has other parameters", TIER)


@pytest.mark.parametrize(("name", "expected"), HOOKS.items())
def test_hooks(name: str, expected: tuple[str, ...]) -> None:
    hook = getattr(SecondaryTierManager, name)
    assert parameters(hook) == expected, moved(f"{name} has other parameters", TIER)


def test_there_is_no_other_hook() -> None:
    public = {
        name
        for name, value in vars(SecondaryTierManager).items()
        if callable(getattr(value, "__func__", value)) and not name.startswith("_")
    }
    new = public - set(HOOKS) - NEWER_HOOKS
    assert not new, moved(f"tiers have the hooks {sorted(new)}", TIER)
    assert SecondaryTierManager.__abstractmethods__ == ABSTRACT, moved(
        "other hooks are abstract", TIER
    )


def test_what_a_tier_is_constructed_with() -> None:
    expected = ("offloading_spec", "primary_kv_view", "tier_type", "backpressure_detector")
    assert parameters(SecondaryTierManager.__init__) == expected, moved("the constructor", TIER)


class Recorder(SecondaryTierManager):  # type: ignore[misc]
    """A tier that has every chunk, and records what it is asked."""

    def __init__(self, **settings: Any) -> None:
        self.calls: list[str] = []
        self.settings = settings
        self.finished: list[JobResult] = []
        super().__init__(
            settings["offloading_spec"], settings["primary_kv_view"], settings["tier_type"]
        )

    def lookup(self, key: bytes, req_context: ReqContext) -> LookupResult:
        self.calls.append("lookup")
        return LookupResult.HIT

    def submit_store(self, job_metadata: Any) -> None:
        self.calls.append("store")
        self.finished.append(JobResult(job_metadata.job_id, True))

    def submit_load(self, job_metadata: Any) -> None:
        self.calls.append("load")
        self.finished.append(JobResult(job_metadata.job_id, True))

    def get_finished_jobs(self) -> list[JobResult]:
        self.calls.append("poll")
        finished, self.finished = self.finished, []
        return finished

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self.calls.append("new request")
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self.calls.append("request finished")

    def serve_external_requests(self, parent: Any) -> None:
        self.calls.append("external")

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self.calls.append("step ends")

    def drain_jobs(self) -> None:
        self.calls.append("drain")

    def shutdown(self) -> None:
        self.calls.append("shutdown")


class Offloading:
    """vLLM's manager of the primary tier and one other, driven as its scheduler does.

    rows: of the primary tier, each with one chunk of `tiny`.
    """

    TIMEOUT_S = 60.0

    def __init__(self, model: Path, tier: Mapping[str, Any], rows: int = 64) -> None:
        chunk_bytes = 128 * models.TINY.kv_bytes_per_token // models.TINY.layers
        extra = {"cpu_bytes_to_use": rows * chunk_bytes, "secondary_tiers": [dict(tier)]}
        transfer = KVTransferConfig(
            kv_connector="OffloadingConnector",
            kv_role="kv_both",
            engine_id=uuid.uuid4().hex,
            kv_connector_extra_config=extra,
        )
        config = configured(model, kv_transfer_config=transfer)
        with set_current_vllm_config(config):
            spec = TieringOffloadingSpec(build_offloading_config(config, groups(FULL)))
            self.manager = spec.get_manager()
        assert spec.num_chunks == rows
        (self.tier,) = self.manager.secondary_tiers

    def request(self, name: str = "") -> ReqContext:
        context = ReqContext(req_id=name or uuid.uuid4().hex)
        self.manager.on_new_request(context)
        return context

    def step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext((), ()))

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
def tiny(directory: Path) -> Path:
    return models.build(directory, models.TINY)


@pytest.fixture
def recorded(tiny: Path) -> Iterator[Offloading]:
    settings = {"type": "Recorder", "module_path": __name__, "mine": 1}
    settings["backpressure"] = {"backpressure_cls": "EMABackpressureDetector"}
    offloading = Offloading(tiny, settings, rows=16)
    yield offloading
    offloading.manager.shutdown()


def test_the_factory_keeps_what_is_its_own(recorded: Offloading) -> None:
    assert set(recorded.tier.settings) == {
        *("offloading_spec", "primary_kv_view", "tier_type", "backpressure_detector", "mine")
    }
    assert recorded.tier.tier_type == "Recorder"
    assert recorded.tier.locality is None


def test_a_type_is_registered_once() -> None:
    with pytest.raises(ValueError, match="already registered"):
        SecondaryTierFactory.register_tier("fs", "somewhere", "Something")


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


class TierSuite:
    """What vLLM's manager asks of a tier: a class for each gives `tier`, and spoils what it has."""

    @pytest.fixture
    def tier(self) -> dict[str, Any]:
        """An entry of `secondary_tiers` with an empty place."""
        raise NotImplementedError

    def spoil(self, tier: dict[str, Any]) -> None:
        """Make everything that is stored unreadable."""
        raise NotImplementedError

    @pytest.fixture
    def start(self, tiny: Path, tier: dict[str, Any]) -> Iterator[Callable[..., Offloading]]:
        """Engines on the same place."""
        started: list[Offloading] = []

        def one(**settings: Any) -> Offloading:
            started.append(Offloading(tiny, tier, **settings))
            return started[-1]

        yield one
        for offloading in started:
            offloading.manager.shutdown()

    def test_what_one_engine_stores_another_reads(self, start: Callable[..., Offloading]) -> None:
        first = start()
        stored = {key: 1 + number for number, key in enumerate(keys(8))}
        first.store(stored)
        first.settle()
        other = start()
        context = other.request()
        assert other.look_up(list(stored), context) == [HIT] * 8
        assert {key: other.read(key, context) for key in stored} == stored
        other.settle()

    def test_nothing_is_found_where_nothing_is(self, start: Callable[..., Offloading]) -> None:
        offloading = start()
        assert offloading.look_up(keys(3), offloading.request()) == [MISS] * 3
        offloading.settle()

    def test_some_chunks_are_there_and_others_not(self, start: Callable[..., Offloading]) -> None:
        first = start()
        there, absent = keys(2), keys(2)
        first.store(dict.fromkeys(there, 7))
        first.settle()
        other = start()
        context = other.request()
        mixed = [there[0], absent[0], there[1], absent[1]]
        assert other.look_up(mixed, context) == [HIT, MISS, HIT, MISS]
        assert [other.read(key, context) for key in there] == [7, 7]

    def test_what_cannot_be_read_is_a_miss_for_the_request_that_tried(
        self, start: Callable[..., Offloading], tier: dict[str, Any]
    ) -> None:
        """A hit again and again would load it again and again, and the request would wait."""
        first = start()
        stored = keys(2)
        first.store(dict.fromkeys(stored, 7))
        first.settle()
        self.spoil(tier)
        other = start()
        context = other.request()
        assert other.look_up(stored, context) == [MISS] * 2
        assert other.look_up(stored, context) == [MISS] * 2
        other.settle()

    def test_a_miss_holds_for_its_request_alone(self, start: Callable[..., Offloading]) -> None:
        reader, writer = start(), start()
        wanted = keys(2)
        early = reader.request()
        assert reader.look_up(wanted, early) == [MISS] * 2
        reader.manager.on_request_finished(early)
        writer.store(dict.fromkeys(wanted, 9))
        writer.settle()
        assert self.found_in_the_end(reader, wanted)

    def found_in_the_end(self, reader: Offloading, wanted: Sequence[bytes]) -> bool:
        deadline_s = time.monotonic() + reader.TIMEOUT_S
        while time.monotonic() < deadline_s:
            context = reader.request()
            found = reader.look_up(wanted, context)
            reader.manager.on_request_finished(context)
            if found == [HIT] * len(wanted):
                return True
            time.sleep(0.05)
        return False

    def test_two_requests_at_once_get_the_same_chunk(
        self, start: Callable[..., Offloading]
    ) -> None:
        first = start()
        (stored,) = keys(1)
        first.store({stored: 5})
        first.settle()
        other = start()
        contexts = [other.request() for _ in range(2)]
        deadline_s = time.monotonic() + other.TIMEOUT_S
        while [other.manager.lookup(stored, context) for context in contexts] != [HIT] * 2:
            assert time.monotonic() < deadline_s
            other.step()
            time.sleep(0.002)
        assert [other.read(stored, context) for context in contexts] == [5, 5]

    def test_a_reset_waits_for_what_is_under_way(self, start: Callable[..., Offloading]) -> None:
        """Then no row is in use, and what was stored by then is another engine's to read."""
        offloading = start()
        stored = dict.fromkeys(keys(8), 3)
        offloading.store(stored)
        offloading.reset()
        assert not offloading.manager.has_pending_work()
        assert offloading.manager.primary_tier._num_allocated_chunks == 0
        assert self.found_in_the_end(start(), list(stored))

    def test_a_request_that_ends_while_its_load_is_under_way(
        self, start: Callable[..., Offloading]
    ) -> None:
        first = start()
        stored = keys(8)
        first.store(dict.fromkeys(stored, 3))
        first.settle()
        other = start()
        context = other.request()
        for key in stored:
            other.manager.lookup(key, context)
        other.step()
        other.manager.on_request_finished(context)
        other.settle()
        again = other.request()
        assert other.look_up(stored, again) == [HIT] * 8
        assert {other.read(key, again) for key in stored} == {3}

    def test_rows_are_used_again(self, start: Callable[..., Offloading]) -> None:
        offloading = start(rows=16)
        stored = {key: 1 + number for number, key in enumerate(keys(32))}
        for at in range(0, 32, 4):
            offloading.store(dict(list(stored.items())[at : at + 4]))
            offloading.settle()
        other = start(rows=16)
        for at in range(0, 32, 4):
            some = list(stored)[at : at + 4]
            context = other.request()
            assert other.look_up(some, context) == [HIT] * 4
            assert {key: other.read(key, context) for key in some} == {
                key: stored[key] for key in some
            }
            other.manager.on_request_finished(context)
        other.settle()

    def test_a_shutdown_in_the_middle(self, start: Callable[..., Offloading]) -> None:
        offloading = start()
        offloading.store(dict.fromkeys(keys(8), 3))
        context = offloading.request()
        for key in keys(2):
            offloading.manager.lookup(key, context)
        offloading.step()

    def test_two_engines_store_the_same(self, start: Callable[..., Offloading]) -> None:
        stored = dict.fromkeys(keys(2), 3)
        for offloading in (start(), start()):
            offloading.store(stored)
            offloading.settle()
        assert self.found_in_the_end(start(), list(stored))


class TestFiles(TierSuite):
    @pytest.fixture
    def tier(self, tmp_path: Path) -> dict[str, Any]:
        return {"type": "fs", "root_dir": str(tmp_path)}

    def spoil(self, tier: dict[str, Any]) -> None:
        for path in Path(tier["root_dir"]).rglob("*.bin"):
            path.write_bytes(b"")


class TestS3(TierSuite):
    @pytest.fixture
    def tier(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
        for name, value in KEYS.items():
            monkeypatch.setenv(name, value)
        register()
        with moto_server() as url, changed(miss_ttl_s=0.01):
            yield {"type": "s3kv", "bucket": BUCKET, "endpoint_url": url, "max_wait_ms": 60_000}

    def spoil(self, tier: dict[str, Any]) -> None:
        server = S3Server(tier["endpoint_url"], KEYS | {"AWS_DEFAULT_REGION": REGION})
        client = server.client()
        for key in server.objects(BUCKET):
            body = client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
            client.put_object(Bucket=BUCKET, Key=key, Body=body[:-1] + bytes([body[-1] ^ 1]))

    def test_its_module_can_be_named_instead(self, tiny: Path, tier: dict[str, Any]) -> None:
        by_module = {"type": "S3Tier", "module_path": S3Tier.__module__}
        offloading = Offloading(tiny, tier | by_module)
        assert isinstance(offloading.tier, S3Tier)
        offloading.manager.shutdown()

    def test_a_request_with_more_chunks_than_rows_comes_to_an_end(
        self, start: Callable[..., Offloading]
    ) -> None:
        """vLLM gives the rows of a request's first chunks to its last ones, so a tier that hits
        them all again keeps the request waiting for ever."""
        first = start()
        stored = keys(12)
        first.store(dict.fromkeys(stored, 3))
        first.settle()
        other = start(rows=4)
        contexts = [other.request() for _ in range(2)]
        for context in contexts:
            found = other.look_up(stored, context)
            assert MISS in found
            other.manager.on_request_finished(context)
        other.settle()

    def test_nothing_from_before_a_reset_is_found_after_it(
        self, start: Callable[..., Offloading]
    ) -> None:
        """vLLM resets for new weights, too, and tells the tier nothing of them."""
        offloading = start()
        stored = keys(2)
        offloading.store(dict.fromkeys(stored, 3))
        offloading.settle()
        offloading.reset()
        assert offloading.look_up(stored, offloading.request()) == [MISS] * 2

    @pytest.mark.parametrize("name", ["host_bytes", "chunk_tokens", "nothing_of_ours"])
    def test_settings_it_does_not_have_are_refused_by_name(
        self, name: str, tiny: Path, tier: dict[str, Any]
    ) -> None:
        with pytest.raises(ConfigError, match=name):
            Offloading(tiny, tier | {name: 1})
