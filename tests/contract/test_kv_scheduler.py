"""The scheduler's side of the connector, driven by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.v1.outputs import KVConnectorOutput

from s3kv.config import Config
from s3kv.connectors import kv_scheduler
from s3kv.connectors.adapter_loads import AdapterReport, LoadedAdapter, hashed_name
from s3kv.connectors.kv_scheduler import SchedulerSide
from s3kv.connectors.kv_translate import KVGeometry, WorkerHandshake, WorkerReport
from s3kv.errors import UnsupportedError
from s3kv.messages import JobEnd, JobKind, StepPlan, StepReport
from s3kv.planning.group_kinds import Coverage, SlidingWindow
from s3kv.types import ChunkKey, Outcome
from tests.contract.pictures import picture, without_tensors
from tests.plans import fetches_of


def side(**settings: Any) -> SchedulerSide:
    config = Config(bucket="bucket", **settings)
    scheduler = SchedulerSide(config, KVGeometry(16, 16, 32), may_load=True, may_save=True)
    scheduler.set_workers([WorkerHandshake("n" * 32, slot_count=8, slot_bytes=4096)], 1)
    return scheduler


def request(name: str, chunks: int = 2) -> Any:
    hashes = [f"{name}-{block}".encode() for block in range(2 * chunks)]
    return SimpleNamespace(
        request_id=name,
        block_hashes=hashes,
        num_tokens=16 * len(hashes),
        skip_reading_prefix_cache=False,
        lora_request=None,
        prompt_embeds=None,
        pooling_params=None,
        mm_features=[],
        kv_transfer_params=None,
    )


def step(tokens: int = 0) -> Any:
    cached = SimpleNamespace(
        req_ids=[], resumed_req_ids=set(), new_block_ids=[], num_computed_tokens=[]
    )
    return SimpleNamespace(
        num_scheduled_tokens={},
        total_num_scheduled_tokens=tokens,
        scheduled_new_reqs=[],
        scheduled_cached_reqs=cached,
        kv_cache_block_copies=None,
        new_block_ids_to_zero=None,
    )


def output(ends: list[JobEnd]) -> Any:
    report = StepReport()
    for end in ends:
        report.add(end)
    return KVConnectorOutput(kv_connector_worker_meta=WorkerReport(report))


def test_the_time_of_a_step_is_known_though_idle_steps_are_not_told_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler = side()
    now_s = 100.0
    monkeypatch.setattr(kv_scheduler.time, "monotonic", lambda: now_s)
    for _ in range(3):
        assert scheduler.plan(step()).number is None, "an idle step is not measured"
        number = scheduler.planner.pace.step_started(now_s, 1_000)
        now_s += 0.5
        report = WorkerReport(StepReport(number=number))
        scheduler.on_output(KVConnectorOutput(kv_connector_worker_meta=report))
    assert scheduler.planner.pace.prefill_tokens_per_s == pytest.approx(2_000)
    assert scheduler.broken is None


def test_workers_linger_only_while_all_the_engine_can_do_is_ask_again() -> None:
    scheduler = side()
    scheduler.on_new_request(request("r"))
    assert scheduler.lookup(request("r"), 0) == (None, False)
    first = scheduler.plan(step())
    assert len(fetches_of(first)) == 2
    assert first.linger_s == 0, "the step before may still be running"
    assert scheduler.plan(step()).linger_s > 0
    assert scheduler.plan(step(tokens=5)).linger_s == 0
    assert scheduler.plan(step()).linger_s == 0
    assert scheduler.plan(step()).linger_s > 0
    scheduler.on_output(
        output(
            [JobEnd(f.job_id, JobKind.FETCH, Outcome.MISSING, 0, 0.1) for f in fetches_of(first)]
        )
    )
    assert scheduler.plan(step()).linger_s == 0, "nothing is under way"
    assert scheduler.broken is None


def test_a_bug_turns_the_cache_off_and_strands_nobody(caplog: pytest.LogCaptureFixture) -> None:
    scheduler = side()
    subject = request("r")
    scheduler.on_new_request(subject)
    scheduler.lookup(subject, 0)
    # The engine never takes what it was not offered; the planner says so with an AssertionError.
    blocks = SimpleNamespace(get_block_ids=lambda: ([0, 1],))
    scheduler.admitted(subject, blocks, 32)
    assert scheduler.broken == "_admitted"
    assert "runs without its cache until a restart" in caplog.text
    assert scheduler.plan(step()).abandons == ("r",), "the load it waits for will not come"
    assert scheduler.plan(step()).abandons == ()
    assert scheduler.lookup(request("other"), 0) == (0, False)
    scheduler.on_finished(subject)
    stats = scheduler.stats()
    assert stats is not None
    assert stats.data["internal_errors"] == 1


@pytest.mark.parametrize("local_tokens", [0, 32, 64])
def test_a_request_whose_hashes_say_too_little_has_no_cache(local_tokens: int) -> None:
    scheduler = side()
    subject = request("r")
    subject.mm_features = [without_tensors("my-cat.png")]
    scheduler.on_new_request(subject)
    assert scheduler.lookup(subject, local_tokens) == (0, False)
    plan = scheduler.plan(step())
    assert (fetches_of(plan), plan.saves) == ((), ())
    scheduler.on_finished(subject)
    scheduler.planner.check()
    assert scheduler.broken is None


def saves(scheduler: SchedulerSide, subject: Any) -> int:
    """Saves ordered in a step that computes all of the request."""
    new = SimpleNamespace(
        req_id=subject.request_id,
        mm_features=subject.mm_features,
        block_ids=([1, 2, 3, 4],),
        num_computed_tokens=0,
    )
    work = step(tokens=64)
    work.scheduled_new_reqs = [new]
    work.num_scheduled_tokens = {subject.request_id: 64}
    return len(scheduler.plan(work).saves)


PRIVATE = {"s3kv": {"save": False}}


def test_nothing_of_a_private_request_is_saved_and_the_same_prompt_in_public_is() -> None:
    scheduler = side()
    for params, saved in ((PRIVATE, 0), (None, 2)):
        subject = request("r")
        subject.kv_transfer_params = params
        subject.skip_reading_prefix_cache = True
        scheduler.on_new_request(subject)
        scheduler.lookup(subject, 0)
        scheduler.admitted(subject, SimpleNamespace(get_block_ids=lambda: ([1, 2, 3, 4],)), 0)
        assert saves(scheduler, subject) == saved
        scheduler.on_finished(subject)
    assert scheduler.broken is None


def test_a_request_that_must_not_load_asks_the_bucket_for_nothing() -> None:
    scheduler = side()
    subject = request("r")
    subject.kv_transfer_params = {"s3kv": {"load": False}}
    scheduler.on_new_request(subject)
    assert scheduler.lookup(subject, 0) == (0, False)
    assert fetches_of(scheduler.plan(step())) == ()


def test_a_request_whose_parameters_cannot_be_read_is_served_and_not_saved(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scheduler = side()
    subject = request("r")
    subject.kv_transfer_params = {"s3kv": {"saev": False}}
    subject.skip_reading_prefix_cache = True
    scheduler.on_new_request(subject)
    scheduler.lookup(subject, 0)
    scheduler.admitted(subject, SimpleNamespace(get_block_ids=lambda: ([1, 2, 3, 4],)), 0)
    assert saves(scheduler, subject) == 0
    (line,) = (r.getMessage() for r in caplog.records if r.levelname == "WARNING")
    assert "nothing of request r" in line
    assert "saev" in line
    assert scheduler.broken is None


def computing(scheduler: SchedulerSide, name: str, value: float) -> Any:
    subject = request(name)
    subject.mm_features = [picture("ab" * 32, value=value)]
    subject.skip_reading_prefix_cache = True
    scheduler.on_new_request(subject)
    assert scheduler.lookup(subject, 0) == (0, False)
    scheduler.admitted(subject, SimpleNamespace(get_block_ids=lambda: ([1, 2, 3, 4],)), 0)
    return subject


@pytest.mark.parametrize("planted", [False, True])
def test_whoever_shares_a_name_with_another_image_is_not_saved_any_more(planted: bool) -> None:
    scheduler = side()
    subject = computing(scheduler, "r", 1.0)
    if planted:
        assert saves(scheduler, computing(scheduler, "planted", 2.0)) == 0
    assert saves(scheduler, subject) == (0 if planted else 2)
    assert scheduler.broken is None
    scheduler.planner.check()


def told(scheduler: SchedulerSide) -> dict[str, Any]:
    stats = scheduler.stats()
    return {} if stats is None else stats.data


def test_what_is_missed_and_what_memory_holds_is_told() -> None:
    config = Config(bucket="bucket")
    scheduler = SchedulerSide(config, KVGeometry(16, 16, 32), may_load=True, may_save=True)
    handshake = [WorkerHandshake("n" * 32, 8, 4096), WorkerHandshake("n" * 32, 8, 8192)]
    scheduler.set_workers(handshake, 2)
    slot = 4096 + 8192
    first = told(scheduler)
    assert first["slab_bytes|free"] == 8 * slot, "of both ranks"
    assert (first["breaker|closed"], first["breaker|open"]) == (1, 0)
    assert scheduler.stats() is None, "nothing has happened"

    scheduler.on_new_request(request("r"))
    assert scheduler.lookup(request("r"), 0) == (None, False)
    asked = told(scheduler)
    assert asked["fetches"] == 2
    assert (asked["slab_bytes|free"], asked["slab_bytes|filling"]) == (6 * slot, 2 * slot)
    good, bad = fetches_of(scheduler.plan(step()))
    assert scheduler.stats() is None
    ends = {good: Outcome.OK, bad: Outcome.CORRUPT}
    for _ in handshake:
        scheduler.on_output(
            output([JobEnd(f.job_id, JobKind.FETCH, o, 9, 0.1) for f, o in ends.items()])
        )
    arrived = told(scheduler)
    assert arrived["misses|corrupt"] == 1, "once, not once per rank"
    assert "fetch_ok" not in arrived, "the ranks tell of it"
    assert arrived["slab_bytes|clean"] == arrived["slab_pinned_bytes"] == slot
    scheduler.on_finished(request("r"))
    assert told(scheduler) == {"slab_pinned_bytes": 0}
    assert scheduler.broken is None


def test_dropped_saves_are_told_by_reason() -> None:
    scheduler = side()
    ledger = scheduler.planner.ledger
    for number in range(8):
        assert ledger.plan_save(ChunkKey(0, bytes([number])), ())
    assert not ledger.plan_save(ChunkKey(0, b"9"), ())
    scheduler.planner.counters["saves_dropped"] += 3
    data = told(scheduler)
    assert data["saves_dropped|memory_full"] == 1
    assert data["saves_dropped|inflight"] == 2


def test_a_bug_in_telling_costs_the_cache_not_the_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = side()
    monkeypatch.setattr(kv_scheduler, "host_gauges", None)
    scheduler.stats()
    assert scheduler.broken == "_read_gauges"
    assert told(scheduler)["internal_errors"] == 1
    assert "without its cache" in caplog.text


def asked_for(scheduler: SchedulerSide, name: str) -> set[ChunkKey]:
    """The chunks that a request has fetched."""
    scheduler.on_new_request(request(name))
    scheduler.lookup(request(name), 0)
    return {fetch.key for fetch in fetches_of(scheduler.plan(step()))}


def test_workers_that_say_the_same_again_change_nothing() -> None:
    """vLLM 0.33 has them do so at every wake-up, after a reset that has to outlive it."""
    scheduler, fresh = side(), side()
    planner = scheduler.planner
    assert scheduler.reset()
    scheduler.set_workers([WorkerHandshake("n" * 32, slot_count=8, slot_bytes=4096)], 1)
    assert scheduler.planner is planner
    before, after = asked_for(fresh, "r"), asked_for(scheduler, "r")
    assert len(before) == len(after) == 2
    assert not before & after


@pytest.mark.parametrize(
    "handshakes",
    [[], [WorkerHandshake("n" * 32, 9, 4096)], [WorkerHandshake("m" * 32, 8, 4096)]],
)
def test_other_workers_than_at_the_start_are_refused(handshakes: list[WorkerHandshake]) -> None:
    scheduler = side()
    with pytest.raises(UnsupportedError, match="not those that the engine started with"):
        scheduler.set_workers(handshakes, 1)


# ---------------------------------------------------------------------------- late reports


def reporting(*handshakes: WorkerHandshake) -> Any:
    """The output of a step in which these workers reported."""
    report = WorkerReport(StepReport())
    for handshake in handshakes:
        report.aggregate(WorkerReport(StepReport(), (handshake,)))
    return KVConnectorOutput(kv_connector_worker_meta=report)


def unheard(world_size: int = 2) -> SchedulerSide:
    scheduler = SchedulerSide(
        Config(bucket="bucket"),
        KVGeometry(16, 16, 32),
        may_load=True,
        may_save=True,
    )
    scheduler.set_workers([], world_size)
    return scheduler


HELLO = WorkerHandshake("n" * 32, slot_count=8, slot_bytes=4096)


@pytest.mark.parametrize("at_once", [True, False])
def test_workers_that_report_in_the_first_step_are_served_from_then_on(at_once: bool) -> None:
    scheduler = unheard()
    early = request("early")
    scheduler.on_new_request(early)
    assert scheduler.lookup(early, 0) == (0, False)
    assert scheduler.plan(step()) == StepPlan()
    scheduler.on_output(reporting(HELLO, HELLO) if at_once else reporting(HELLO))
    assert scheduler.planner.ledger.table.count == (8 if at_once else 1)
    scheduler.on_output(reporting() if at_once else reporting(HELLO))
    assert scheduler.planner.ledger.table.count == 8
    assert scheduler.lookup(early, 0) == (0, False)
    late = request("late")
    scheduler.on_new_request(late)
    assert scheduler.lookup(late, 0) == (None, False)
    assert len(fetches_of(scheduler.plan(step()))) == 2
    scheduler.on_finished(early)
    scheduler.set_workers([], 2)  # at a wake-up
    assert scheduler.broken is None


def test_a_reset_before_the_workers_report_is_kept() -> None:
    keys = []
    for resets in (False, True):
        scheduler = unheard(world_size=1)
        if resets:
            assert scheduler.reset()
        scheduler.on_output(reporting(HELLO))
        scheduler.on_new_request(request("r"))
        scheduler.lookup(request("r"), 0)
        keys.append([fetch.key for fetch in fetches_of(scheduler.plan(step()))])
        assert scheduler.broken is None
    assert len(keys[0]) == len(keys[1]) == 2
    assert not set(keys[0]) & set(keys[1])


def test_workers_that_do_not_fit_together_turn_the_cache_off(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scheduler = unheard()
    scheduler.on_output(reporting(HELLO, WorkerHandshake("m" * 32, 8, 4096)))
    assert scheduler.broken == "on_output"
    assert "the ranks disagree on the namespace" in caplog.text
    assert scheduler.lookup(request("r"), 0) == (0, False)


def test_after_a_worker_has_failed_nothing_is_offered_and_no_adapter_waited_for() -> None:
    scheduler = side()
    waiting = request("r")
    scheduler.on_new_request(waiting)
    assert scheduler.lookup(waiting, 0) == (None, False)
    report = WorkerReport(StepReport()).aggregate(WorkerReport(StepReport(), broken=True))
    scheduler.on_output(KVConnectorOutput(kv_connector_worker_meta=report))
    assert scheduler.broken is not None
    assert scheduler.lookup(waiting, 0) == (0, False)
    assert scheduler.plan(step()) == StepPlan()


# --- adapters ---------------------------------------------------------------------------------

ADAPTER = LoRARequest("a", 1, "/nowhere")
LOADED = LoadedAdapter(hashed_name(ADAPTER), b"content")


def adapted(name: str, **more: Any) -> Any:
    subject = request(name)
    subject.lora_request = ADAPTER
    for attribute, value in more.items():
        setattr(subject, attribute, value)
    return subject


def planned(scheduler: SchedulerSide, scheduled: Any = None) -> StepPlan:
    """As the connector does it, which numbers each step."""
    plan = scheduler.plan(step() if scheduled is None else scheduled)
    scheduler.adapters.next_step()
    return plan


def tell(scheduler: SchedulerSide, number: int, *loaded: LoadedAdapter) -> None:
    report = AdapterReport(number, dict(zip([1], loaded, strict=False)))
    meta = WorkerReport(StepReport(), adapters=report)
    scheduler.on_output(KVConnectorOutput(kv_connector_worker_meta=meta))


def step_of(subject: Any, blocks: list[int]) -> Any:
    """A step that computes all of the request's tokens."""
    scheduled = step(tokens=64)
    scheduled.num_scheduled_tokens = {subject.request_id: 64}
    new = SimpleNamespace(
        req_id=subject.request_id, mm_features=[], block_ids=(blocks,), num_computed_tokens=0
    )
    scheduled.scheduled_new_reqs = [new]
    return scheduled


def admit(scheduler: SchedulerSide, subject: Any) -> Any:
    blocks = [1, 2, 3, 4]
    scheduler.admitted(subject, SimpleNamespace(get_block_ids=lambda: (blocks,)), 0)
    return step_of(subject, blocks)


def test_a_request_with_an_adapter_waits_for_what_the_workers_have_loaded() -> None:
    scheduler = side(max_wait_ms=0)
    subject = adapted("r")
    scheduler.on_new_request(subject)
    assert scheduler.lookup(subject, 0) == (None, False)
    assert fetches_of(planned(scheduler)) == (), "nothing to ask the bucket for yet"
    tell(scheduler, 1, LOADED)
    scheduler.lookup(subject, 0)
    fetched = fetches_of(planned(scheduler))
    assert len(fetched) == 2
    assert not {fetch.key.block_hash for fetch in fetched} & set(subject.block_hashes)
    plain = adapted("r2", lora_request=None)
    scheduler.on_new_request(plain)
    assert scheduler.lookup(plain, 0) == (0, False), "without an adapter nobody waits"
    for one in (subject, plain):
        scheduler.on_finished(one)
    assert scheduler.broken is None


def test_what_is_not_loaded_yet_is_neither_looked_up_nor_saved() -> None:
    scheduler = side()
    subject = adapted("r")
    scheduler.on_new_request(subject)
    assert scheduler.lookup(subject, 0) == (None, False)
    planned(scheduler)
    tell(scheduler, 1)
    assert scheduler.lookup(subject, 0) == (0, False)
    plan = planned(scheduler, admit(scheduler, subject))
    assert (fetches_of(plan), plan.saves) == ((), ())
    later = adapted("r2")
    tell(scheduler, 2, LOADED)
    scheduler.on_new_request(later)
    assert scheduler.lookup(later, 0) == (None, False)
    fetches = fetches_of(planned(scheduler))
    assert len(fetches) == 2, "asked for at once, under what is believed"
    assert scheduler.broken is None


@pytest.mark.parametrize("now", [None, "other"])
def test_what_was_believed_of_an_adapter_and_is_not_so(now: str | None) -> None:
    """It was loaded anew between two steps, before the request came."""
    scheduler = side()
    planned(scheduler)
    tell(scheduler, 1, LOADED)
    subject = adapted("r")
    scheduler.on_new_request(subject)
    assert scheduler.lookup(subject, 0) == (None, False)
    believed = {fetch.key for fetch in fetches_of(planned(scheduler))}
    assert len(believed) == 2
    tell(scheduler, 2, *([LoadedAdapter(LOADED.name, now.encode())] if now else []))
    answer = scheduler.lookup(subject, 0)
    plan = planned(scheduler)
    asked = {fetch.key for fetch in fetches_of(plan)}
    assert len(plan.cancels) == 2
    assert not asked & believed
    assert (answer, len(asked)) == (((None, False), 2) if now else ((0, False), 0))
    scheduler.on_finished(subject)
    assert scheduler.broken is None


def test_a_request_that_runs_across_a_load_saves_nothing_any_more() -> None:
    scheduler = side()
    planned(scheduler)
    tell(scheduler, 1, LOADED)
    subjects = [adapted("across"), adapted("alone", skip_reading_prefix_cache=True)]
    for subject in subjects:
        scheduler.on_new_request(subject)
        scheduler.lookup(subject, 0)
    planned(scheduler)
    tell(scheduler, 2, LOADED)
    scheduled = [admit(scheduler, subject) for subject in subjects]
    tell(scheduler, 2, LoadedAdapter(LOADED.name, b"other"))
    for output in scheduled:
        assert planned(scheduler, output).saves == ()
    scheduler.planner.check()
    assert scheduler.broken is None


def test_a_private_request_that_is_entered_again_stays_private() -> None:
    scheduler = side()
    planned(scheduler)
    tell(scheduler, 1, LOADED)
    subject = adapted("r")
    subject.kv_transfer_params = PRIVATE
    scheduler.on_new_request(subject)
    scheduler.lookup(subject, 0)
    planned(scheduler)
    tell(scheduler, 2, LoadedAdapter(LOADED.name, b"other"))
    scheduler.lookup(subject, 64)
    assert scheduler.planner.limits_of("r").save_tokens == 0
    assert scheduler.broken is None


def test_an_object_has_the_room_that_its_longest_shard_needs() -> None:
    """Pages instead of slots where there are objects of several lengths."""
    window = Coverage(16, 32, SlidingWindow(20), 1, (0,))
    sizes = KVGeometry(16, 16, 32, (Coverage(16, 32, members=(1,)), window))
    scheduler = SchedulerSide(Config(bucket="bkt"), sizes, may_load=True, may_save=True)
    handshakes = [
        WorkerHandshake("n" * 32, 64, 4096, (9_000, 5_000)),
        WorkerHandshake("n" * 32, 80, 4096, (8_000, 13_000)),
    ]
    scheduler.set_workers(handshakes, 2)
    table = scheduler.planner.ledger.table
    assert table.count == 64
    for group, pages in ((0, 3), (1, 4)):
        reservation = table.reserve(ChunkKey(group, b"k" * 32))
        assert reservation is not None
        assert reservation.entry.units == pages
