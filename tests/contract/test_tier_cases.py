"""S3Tier with a real I/O process, mostly under vLLM's manager: vLLM's own cases, and others.

A docstring that names tests has those of vLLM's that it follows. In vLLM's
tests/v1/kv_offload/tiering "manager" is test_tiering_offloading.py, "obj" test_obj_tier.py, "fs"
test_fs_tier.py, "pressure" test_backpressure.py, "factory" test_factory.py, "thread"
test_control_plane_thread.py and "p2p" p2p/test_manager.py.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call, patch

import numpy as np
import pytest
from vllm.config import KVEventsConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import _parse_tier_filter
from vllm.v1.kv_cache_interface import KVCacheGroupSpec
from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.tiering.base import JobResult, TieringOffloadingMetrics, TransferJob
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from lab import models
from lab.constants import changed
from lab.offloading_on_cpu import worker_alone
from lab.s3 import S3Server
from s3kv.connectors.linger import LINGER_S
from s3kv.connectors.offload_tier import S3Tier
from s3kv.connectors.plugin import register
from tests.contract.configurations import FULL, WINDOW, grouping_module
from tests.contract.test_kv_groups import STATE
from tests.contract.test_tier_api import HIT, MISS, Offloading, Recorder, keys, recorded_as
from tests.servers import BUCKET, KEYS, REGION, moto_server, set_credentials
from tests.system.forms import flipped
from tests.versions import VERSION

PENDING, RETRY = base.LookupResult.HIT_PENDING, base.LookupResult.RETRY
ALL = base.RequestOffloadingContext(base.OffloadPolicy.REQUEST_LEVEL)
NUMBERS = itertools.count()
Entry = dict[str, Any]
Start = Callable[..., Offloading]


@pytest.fixture
def s3kv(monkeypatch: pytest.MonkeyPatch) -> Iterator[Entry]:
    """An entry of `secondary_tiers`."""
    register()
    set_credentials(monkeypatch, KEYS)
    with moto_server() as url, changed(miss_ttl_s=0.01):
        yield {"type": "s3kv", "bucket": BUCKET, "endpoint_url": url, "max_wait_ms": 60_000}


@pytest.fixture
def start(directory: Path, s3kv: Entry) -> Iterator[Start]:
    """Managers with these tiers; without any, with that of s3kv."""
    started: list[Offloading] = []

    def one(*tiers: Entry, **more: Any) -> Offloading:
        started.append(Offloading(models.build(directory, models.TINY), *(tiers or [s3kv]), **more))
        return started[-1]

    yield one
    for offloading in started:
        offloading.manager.shutdown()


@pytest.fixture
def engine(start: Start) -> Offloading:
    return start()


@pytest.fixture
def entries(s3kv: Entry, tmp_path: Path) -> dict[str, Entry]:
    by_module = {"type": "S3Tier", "module_path": S3Tier.__module__, "prefix": "other"}
    fs = {"type": "fs", "root_dir": str(tmp_path)}
    return {"s3kv": s3kv, "fs": fs, "other": s3kv | by_module}


@pytest.fixture(params=["fs", "s3kv"])
def either(request: Any, start: Start, entries: dict[str, Entry]) -> Start:
    """Managers with a tier of vLLM's or with ours: what holds for both is asked of any tier."""
    return partial(start, entries[request.param])


def server_of(s3kv: Entry) -> S3Server:
    return S3Server(s3kv["endpoint_url"], KEYS | {"AWS_DEFAULT_REGION": REGION})


@contextmanager
def stopped(engine: Offloading) -> Iterator[Callable[[], None]]:
    """Meanwhile the I/O process does nothing. Gives what kills it."""
    pid = engine.tier._tier.client.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        yield lambda: os.kill(pid, signal.SIGKILL)
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def calls(tier: Any, name: str) -> Any:
    """A block in which this hook still does what it does, and its calls are recorded."""
    return patch.object(tier, name, wraps=getattr(tier, name))


def put(engine: Offloading, count: int) -> list[bytes]:
    """Store new chunks, filled with 3."""
    chunks = keys(count)
    engine.store(dict.fromkeys(chunks, 3))
    engine.settle()
    return chunks


def pins(engine: Offloading, chunks: Sequence[bytes]) -> set[int]:
    return {engine.manager.primary_tier._policy.get(key).ref_cnt for key in chunks}


# ------------------------------------------------------------- jobs given to the tier itself


def job(engine: Offloading, to: str, chunks: Sequence[bytes], rows: Sequence[int]) -> TransferJob:
    context, numbers = base.ReqContext("one"), np.array(rows, np.int32)
    engine.tier.on_new_request(context)
    one = TransferJob(next(NUMBERS), chunks, numbers, to == "load", context)
    getattr(engine.tier, f"submit_{to}")(one)
    engine.tier.on_schedule_end(base.ScheduleEndContext((), ()))
    return one


def ends(engine: Offloading, *jobs: TransferJob) -> list[JobResult]:
    """The results of these jobs, in their order. Each is reported once, and no other is."""
    found: dict[int, JobResult] = {}
    deadline_s = time.monotonic() + engine.TIMEOUT_S
    while len(found) < len(jobs):
        assert time.monotonic() < deadline_s, "the tier does not report all jobs"
        reported = {one.job_id: one for one in engine.tier.get_finished_jobs()}
        assert not found.keys() & reported
        found |= reported
    assert not list(engine.tier.get_finished_jobs())
    return [found[one.job_id] for one in jobs]


def whole(engine: Offloading, *jobs: TransferJob) -> list[bool]:
    return [end.success for end in ends(engine, *jobs)]


@pytest.mark.parametrize("count", [0, 1, 5])
def test_bytes_come_back_into_other_rows(count: int, engine: Offloading) -> None:
    """fs: store_load_data_integrity. obj: store_then_load_roundtrip, store_multiple_blocks."""
    rows, chunks = engine._rows, keys(count)
    rows[:5] = np.random.default_rng(count).integers(0, 127, rows[:5].shape)
    expected = rows[:count].copy()
    assert whole(engine, job(engine, "store", chunks, range(count))) == [True]
    rows[:5] = 0
    assert whole(engine, job(engine, "load", chunks, range(20, 20 + count))) == [True]
    assert np.array_equal(rows[20 : 20 + count], expected)


def test_a_job_is_reported_once_and_not_before_its_end(engine: Offloading) -> None:
    """obj: pending_transfer_not_returned_until_done, failure_and_success_both_returned,
    failed_transfer_reported, multiple_jobs_tracked_independently. fs: failed_load_missing_file,
    out_of_bounds_block_id_smoke."""
    there, outside = keys(1), [len(engine._rows)]
    with stopped(engine):
        stores = [job(engine, "store", some, [row]) for row, some in enumerate((there, keys(1)))]
        assert not list(engine.tier.get_finished_jobs())
    assert whole(engine, *stores) == [True, True]
    beyond = [job(engine, "load", there, outside), job(engine, "store", keys(1), outside)]
    mixed = [job(engine, "load", there, [4]), job(engine, "load", keys(1), [5])]
    assert whole(engine, *mixed, *beyond) == [True, False, False, False]
    with stopped(engine) as kill:
        lost = [job(engine, "store", keys(1), [2]), job(engine, "load", there, [3])]
        kill()
        assert whole(engine, *lost) == [False, False]


@pytest.mark.parametrize(("said", "meant"), [({}, "REMOTE"), ({"locality": "LOCAL"}, "LOCAL")])
def test_events(said: Entry, meant: str, start: Start, s3kv: Entry) -> None:
    """obj and fs: successful_store_emits_stored_event, store_event_uses_configured_locality,
    load_job_emits_no_event, failed_transfer_emits_no_event, events_disabled_by_default,
    invalid_locality_raises_at_construction. manager: take_events_aggregates_tier_owned_events."""
    with pytest.raises(ValueError, match="Locality"):
        start(s3kv | {"locality": meant.lower()})
    silent = start(s3kv)
    put(silent, 1)
    assert not list(silent.manager.take_events())
    observed = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    engine = start(s3kv | said, kv_events_config=observed)
    chunks = put(engine, 2)
    events = list(engine.manager.take_events())
    assert {key for e in events if e.medium is base.Medium.CPU for key in e.keys} == set(chunks)
    ours = [(*e.keys, e.locality, e.removed) for e in events if e.medium is base.Medium.STORAGE]
    assert sorted(ours) == sorted((key, base.Locality(meant), False) for key in chunks)
    ends(engine, job(engine, "load", chunks, (61, 62)))
    with stopped(engine) as kill:
        failed = job(engine, "store", keys(1), [60])
        kill()
        assert whole(engine, failed) == [False]
    assert not list(engine.manager.take_events())


# ----------------------------------------------------------------------- under the manager


def test_a_failed_promotion_leaves_the_chunks_that_arrived(start: Start, s3kv: Entry) -> None:
    """manager: failed_promotion_keeps_only_successful_blocks, failed_ and
    successful_promotion_finalizes_primary, promotion_from_secondary. obj:
    failed_load_marks_verdict_negative. fs: transient_load_failure_leaves_file,
    batched_partial_load_failure_keeps_loaded_blocks, multi_block_job_partial_failure."""
    writer, engine = start(), start()
    bad = put(writer, 1)
    server_of(s3kv).change(BUCKET, flipped)
    good = put(writer, 2)
    context = engine.request()
    with stopped(engine) as kill:
        assert engine.manager.lookup(good[0], context) is PENDING
        engine.step()
        kill()
        assert engine.look_up(good[:1], context) == [MISS]
    found_in_the_end(engine, good[:1])
    with calls(engine.manager.primary_tier, "complete_write") as written:
        assert engine.look_up(bad + good, context := engine.request()) == [MISS, HIT, HIT]
    told = {(*call.args[0], call.args[2]) for call in written.call_args_list}
    assert told == {(*bad, False), (good[1], True)}
    if VERSION >= (0, 32):
        assert engine.manager.get_load_source(good[1], context).name == "DISK"
    with calls(engine.tier, "submit_load") as load:
        assert engine.look_up(bad + good, context) == [MISS, HIT, HIT]
    assert not load.called
    assert [engine.read(key, context) for key in good] == [3, 3]


def test_one_load_per_request_and_one_of_a_chunk_that_two_want(engine: Offloading) -> None:
    """manager: lookup_batches_submit_load_per_request, lookup_from_primary,
    lookup_shared_block_no_duplicate_promotion."""
    (own, *shared), contexts = keys(3), [engine.request(), engine.request()]
    with calls(engine.tier, "submit_load") as load, calls(engine.tier, "lookup") as lookup:
        for asked, context in zip(([shared[0]], [own, *shared]), contexts, strict=True):
            assert {engine.manager.lookup(key, context) for key in asked} == {PENDING}
        assert not load.called
        engine.step()
        stored = put(engine, 2)
        lookup.reset_mock()
        assert engine.look_up(stored, contexts[0]) == [HIT] * 2
    assert not lookup.called
    jobs = [call.args[0] for call in load.call_args_list]
    assert [list(one.keys) for one in jobs] == [[shared[0]], [own, shared[1]]]
    assert all(one.req_context is context for one, context in zip(jobs, contexts, strict=True))


def test_rows_are_pinned_as_long_as_they_are_sent(start: Start) -> None:
    """manager: ref_cnt_protection_during_cascade, eviction_in_primary_tier,
    touch_propagates_to_all_tiers."""
    engine, chunks = start(rows=8), keys(2)
    with stopped(engine):
        engine.store(dict.fromkeys(chunks, 3))
        engine.step()
        assert (pins(engine, chunks), engine.manager.has_pending_work()) == ({1}, True)
        assert engine.manager.prepare_store(keys(7), engine.request()) is None
    engine.settle()
    assert pins(engine, chunks) == {0}
    context = engine.request()
    with calls(engine.tier, "touch") as touch:
        engine.manager.touch(chunks[:1], context)
    touch.assert_called_once_with(chunks[:1], context)
    assert engine.manager.prepare_store(keys(7), context).evicted_keys == chunks[1:]


@pytest.mark.parametrize("how", ["stored", "failed", "nothing", "reset"])
def test_a_request_is_forgotten_after_its_last_store(how: str, engine: Offloading) -> None:
    """manager: on_request_finished_delays_secondary_until_store_submitted, failed_store_no_cascade,
    failed_store_finalizes_finished_request, zero_store_request_finalizes_immediately,
    reset_cache_finalizes_delayed_secondary_request."""
    chunks, context, manager, seen = keys(2), engine.request(), engine.manager, Mock()
    with (
        calls(engine.tier, "submit_store") as store,
        calls(engine.tier, "on_request_finished") as finish,
    ):
        seen.attach_mock(store, "store")
        seen.attach_mock(finish, "finish")
        if how != "nothing":
            manager.prepare_store(chunks, context)
        manager.on_request_finished(context)
        assert finish.called == (how == "nothing")
        if how == "reset":
            engine.reset()
        elif how != "nothing":
            manager.complete_store(chunks, context, success=how == "stored")
    assert [name for name, *_ in seen.mock_calls] == ["store"] * (how == "stored") + ["finish"]
    assert not engine.tier.planner._requests


def test_a_reset_ends_what_is_under_way_and_drops_what_has_not_begun(start: Start) -> None:
    """manager: reset_cache_clears_orchestrator_state, reset_cache_drains_all_tiers,
    reset_cache_clears_pending_primary_stores_for_active_request. obj:
    drain_jobs_polls_until_transfers_complete. vLLM resets for new weights, too, and tells the tier
    nothing of them; so nothing from before is found afterwards."""
    engine, other = start(), start()
    manager, context = engine.manager, engine.request()
    manager.prepare_store(keys(1), context)
    with calls(engine.tier, "submit_load") as load, calls(engine.tier, "drain_jobs") as drain:
        assert manager.lookup(*keys(1), context) is PENDING
        engine.step()
        engine.store(dict.fromkeys(stored := keys(3), 3))
        assert manager.lookup(*keys(1), context) is PENDING
        tier = "s3kv.connectors.offload_tier"
        with patch(f"{tier}._SETTLE_S", engine.TIMEOUT_S), patch(f"{tier}.reset_items") as items:
            engine.reset()
        items.assert_called_once_with()
        engine.step()
    assert (load.call_count, drain.call_count, manager.has_pending_work()) == (1, 1, False)
    assert manager.primary_tier._num_allocated_chunks == 0
    assert len(engine.tier._tier.client._jobs) == 0
    assert other.look_up(stored, other.request()) == [HIT] * 3
    assert engine.look_up(stored, engine.request()) == [MISS] * 3
    manager.prepare_store(later := keys(1), context)
    manager.complete_store(later, context)
    manager.on_request_finished(context)
    assert context.req_id not in engine.tier.planner._requests


@pytest.mark.parametrize(
    ("loads", "saves", "tiers", "role"),
    [
        (False, False, [], "kv_both"),
        (False, False, [{"medium": "cpu"}, {"medium": "storage", "locality": "local"}], "kv_both"),
        (True, True, [{"locality": "remote"}], "kv_both"),
        (True, False, [{}], "kv_consumer"),
        (False, True, [{}], "kv_producer"),
    ],
)
def test_what_an_engine_and_a_request_may_do(
    loads: bool, saves: bool, tiers: Any, role: str, start: Start
) -> None:
    """manager: tier_filter_skips_filtered_secondary, tier_filter_allows_matching_secondary,
    complete_store_forwards_req_context_to_submit_store."""
    engine, params = start(role=role), {"s3kv": {"save": saves or role == "kv_consumer"}}
    params["max_load_tokens"] = 128  # behind those in the engine's own cache, which vLLM knows
    context = base.ReqContext("it", params, load_tier_filter=_parse_tier_filter(tiers))
    engine.manager.on_new_request(context)
    context.set_offload_key_position(asked := keys(1)[0], 1024 + 128)
    assert (engine.manager.lookup(asked, context) is PENDING) == loads
    engine.manager.prepare_store(chunks := keys(1), context)
    context.set_offload_key_position(*chunks, 128)
    engine.manager.complete_store(chunks, context)
    engine.settle()
    assert engine.tier.planner.index.is_present(engine.tier._chunk(*chunks)) == saves


def test_an_engine_pauses_if_all_its_requests_wait_for_the_bucket(engine: Offloading) -> None:
    one, other, chunk = engine.request(), engine.request(), keys(1)[0]
    with stopped(engine), calls(engine.tier._tier.client, "poll") as polls:
        for pauses in ([], [call(LINGER_S)]):
            assert engine.manager.lookup(chunk, one) is PENDING  # polls
            polls.reset_mock()
            engine.step()
            assert polls.call_args_list == pauses
            if not pauses:
                engine.manager.on_request_finished(other)
    assert engine.look_up([chunk], one) == [MISS]
    with calls(engine.tier._tier.client, "poll") as polls:
        engine.step()
    assert polls.call_args_list == []


def test_metrics(engine: Offloading, s3kv: Entry) -> None:
    """manager: tiering_spec_collects_secondary_metric_definitions,
    tiering_manager_aggregates_secondary_stats, lookup_reports_sync_delay_for_resolved_lookups,
    lookup_does_not_report_async_delay_for_promotion,
    lookup_reports_async_delay_when_deferred_lookup_resolves."""
    defined = TieringOffloadingSpec.build_metric_definitions({"secondary_tiers": [s3kv]})
    assert defined["vllm:s3kv_saves_dropped"].labelnames == ("reason",)
    assert TieringOffloadingMetrics.READ_BYTES in defined
    names = TieringOffloadingMetrics.LOOKUP_SYNC_DELAY, TieringOffloadingMetrics.LOOKUP_ASYNC_DELAY
    ours = ["vllm:s3kv_saves", *(f"{name}:('1:s3kv',)_count" for name in names)]

    def counted() -> list[float]:
        values = engine.manager.get_stats().reduce()
        return [sum(n for key, n in values.items() if key.startswith(name)) for name in ours]

    first = engine.manager.get_stats().reduce()
    named = ["fetch_corrupt", "io_requests:('GET', '2xx')", "saves_dropped:('inflight',)"]
    assert [first[f"vllm:s3kv_{name}"] for name in named] == [0, 0, 0]  # before there are any
    put(engine, 2)
    assert counted() == [2, 0, 0]
    context, chunks = engine.request(), keys(5)
    answers = [engine.manager.lookup(key, context) for key in chunks]
    assert (answers, counted()) == ([PENDING] * 4 + [RETRY], [0, 4, 0])
    engine.look_up(chunks, context)
    assert counted()[2] == 1


@pytest.mark.parametrize("under", [True, False])
def test_pressure_holds_up_stores_alone(under: bool, start: Start, s3kv: Entry) -> None:
    """pressure: stores_skipped_under_pressure, stores_resume_after_pressure_clears,
    loads_continue_under_pressure, ema_updates_on_store_completion, reset_cache_clears."""
    chunks = put(start(), 2)
    detects = {"backpressure_cls": "EMABackpressureDetector", "policy_cls": "DropStorePolicy"}
    engine = start(s3kv | {"backpressure": detects})
    detector = engine.tier.bp_detector
    detector._under_pressure = under
    with calls(engine.tier, "submit_store") as store, calls(detector, "update") as update:
        put(engine, 2)
    assert store.called == update.called == (not under)
    assert engine.look_up(chunks, engine.request()) == [HIT] * 2
    engine.reset()
    assert not detector.is_under_pressure()


# --------------------------------------------------------------------------- several tiers


@pytest.mark.long
@pytest.mark.parametrize("order", ["s3kv fs", "fs s3kv", "s3kv other"])
def test_every_tier_gets_all_and_each_gives_what_it_has(
    order: str, start: Start, entries: dict[str, Entry]
) -> None:
    """manager: cascade_to_all_secondary_tiers. factory: create_tier_from_registry,
    create_multiple_tiers. obj: partial_block_lookup, lookup_unrelated_key_returns_false."""
    tiers = [entries[name] for name in order.split()]
    in_both, *in_one = (put(start(*some), 2) for some in (tiers, tiers[:1], tiers[1:]))
    for entry in tiers:
        alone = start(entry)
        assert alone.look_up(in_both, alone.request()) == [HIT] * 2
    engine = start(*tiers)
    assert pins(engine, put(engine, 1)) == {0}
    context, chunks = engine.request(), [*in_both, *in_one[0], *in_one[1]]
    with calls(engine.tiers[0], "submit_store") as a, calls(engine.tiers[1], "submit_store") as b:
        assert engine.look_up(chunks + keys(1), context) == [HIT] * 6 + [MISS]
        assert {engine.read(key, context) for key in chunks} == {3}
    assert (a.called, b.called) == (False, False)
    engine.reset()


class Peer(Recorder):
    """A tier without chunks that wants all of a request's, and looks up for a peer."""

    wanted: Sequence[bytes] = ()
    lookup = recorded_as("lookup", lambda *_: MISS)
    on_new_request = recorded_as("new request", lambda *_: ALL)

    def serve_external_requests(self, parent: Any) -> None:
        context = base.ReqContext("peer")
        parent.on_new_request(context)
        if {parent.lookup(key, context) for key in self.wanted} == {HIT}:
            pinned = parent.create_store_job(self.wanted, context)
            self.finished.append(JobResult(pinned.job_id, True))
            self.wanted = ()
        parent.on_request_finished(context)


def test_a_tier_that_serves_peers_beside_it(start: Start, s3kv: Entry) -> None:
    """p2p: lookups of a peer, by ParentManager. manager: on_new_request_lifecycle,
    prepare_store_cascades_existing_blocks_to_request_level_tiers. thread:
    no_thread_when_no_tier_asks_for_one."""
    chunks = put(start(), 2)
    engine = start({"type": "Peer", "module_path": __name__}, s3kv)
    peer, ours = engine.tiers
    peer.wanted = chunks
    engine._until(lambda: not peer.wanted)
    context = base.ReqContext("it")
    assert engine.manager.on_new_request(context).policy is base.OffloadPolicy.REQUEST_LEVEL
    with calls(ours, "submit_store") as store, calls(peer, "submit_store") as other:
        assert not engine.manager.prepare_store(chunks, context).keys_to_store
    assert (store.called, other.called) == (False, True)
    engine.manager.on_request_finished(context)
    assert not ours.planner._requests
    assert getattr(engine.manager, "_tier_poll_thread", None) is None


# ------------------------------------------------------------------------------ more of ours


def found_in_the_end(reader: Offloading, wanted: Sequence[bytes]) -> None:
    deadline_s = time.monotonic() + reader.TIMEOUT_S
    while reader.look_up(wanted, context := reader.request()) != [HIT] * len(wanted):
        assert time.monotonic() < deadline_s
        reader.manager.on_request_finished(context)
        time.sleep(0.05)


def test_a_miss_holds_for_its_request_alone_when_two_have_stored_it(either: Start) -> None:
    reader, wanted = either(), keys(2)
    early = reader.request()
    assert reader.look_up(wanted, early) == [MISS] * 2
    for writer in (either(), either()):
        writer.store(dict.fromkeys(wanted, 9))
        writer.settle()
    assert reader.look_up(wanted, early) == [MISS] * 2
    reader.manager.on_request_finished(early)
    found_in_the_end(reader, wanted)


def test_a_request_that_ends_while_its_load_is_under_way(either: Start) -> None:
    stored, engine = put(either(), 8), either()
    context = engine.request()
    for key in stored:
        engine.manager.lookup(key, context)
    engine.step()
    engine.manager.on_request_finished(context)
    engine.settle()
    again = engine.request()
    assert engine.look_up(stored, again) == [HIT] * 8
    assert {engine.read(key, again) for key in stored} == {3}


def test_rows_are_used_again(either: Start) -> None:
    writer, reader = either(rows=16), either(rows=16)
    stored = {key: 1 + number for number, key in enumerate(keys(32))}
    parts = [dict(list(stored.items())[at : at + 4]) for at in range(0, 32, 4)]
    for part in parts:
        writer.store(part)
        writer.settle()
    for part in parts:
        context = reader.request()
        assert reader.look_up(list(part), context) == [HIT] * 4
        assert {key: reader.read(key, context) for key in part} == part
        reader.manager.on_request_finished(context)


@pytest.mark.parametrize("blocks", [1, 2], ids=["a window", "states"])
def test_an_object_has_only_what_vllm_wrote_for_its_key(
    blocks: int, start: Start, s3kv: Entry, tiny_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By vLLM's own worker: groups of three layers and of two, in rows that others have used."""
    monkeypatch.setattr(tiny_config.cache_config, "kv_cache_layout", "LBHNC")
    page_bytes, other = FULL.page_size_bytes, STATE if blocks > 1 else WINDOW
    padded = dataclasses.replace(other, page_size_padded=page_bytes)
    held = [KVCacheGroupSpec([*"abc"], FULL), KVCacheGroupSpec([*"de"], padded)]
    cache = grouping_module().get_kv_cache_config_from_groups(tiny_config, held, 12 * page_bytes)
    engine = start(s3kv | {"compress": "off"}, cache=cache, blocks=blocks)
    worker = worker_alone(engine.spec, engine.config, cache, fill=1)
    engine._rows[:] = ord("*")
    expected = (blocks, 3 * blocks * page_bytes), (1, 2 * other.page_size_bytes)
    for group, (size, nbytes) in enumerate(expected):
        key, context = base.make_offload_key(bytes(32), group), engine.request()
        rows = engine.manager.prepare_store([key], context).store_spec
        sizes = [size * (number == group) for number in range(2)]
        source = base.GPULoadStoreSpec([*range(1, 1 + size)], sizes, [0, blocks - 1])
        worker.worker.submit_store(group, source, rows)
        worker.worker.wait({group})
        engine.manager.complete_store([key], context)
        engine.settle()
        (row,) = engine._rows[rows.chunk_ids]
        assert [(row == value).sum() for value in (1, 0)] == [nbytes, len(row) - nbytes]
    assert [b"*" * 64 in it for it in server_of(s3kv).contents(BUCKET).values()] == [False] * 2
    worker.shutdown()
