"""The scheduler's side of the KV connector, driven by hand."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.v1.outputs import KVConnectorOutput

from lab.books import check
from s3kv.config import Config
from s3kv.connectors import kv_scheduler
from s3kv.connectors.adapter_loads import AdapterReport, LoadedAdapter, hashed_name
from s3kv.connectors.kv_scheduler import SchedulerSide
from s3kv.connectors.kv_translate import KVGeometry, WorkerHandshake, WorkerReport
from s3kv.errors import UnsupportedError
from s3kv.messages import JobEnd, JobKind, StepPlan, StepReport
from s3kv.planning.group_kinds import Coverage, SlidingWindow
from s3kv.planning.kv import KVPlanner
from s3kv.types import ChunkKey, Outcome
from tests.contract.configurations import SIZES
from tests.contract.hashed_requests import given
from tests.contract.pictures import picture, without_tensors
from tests.plans import fetches_of

HANDSHAKE = WorkerHandshake("n" * 32, slot_count=8, slot_bytes=4096)
BLOCKS = [1, 2, 3, 4]


def side(
    *handshakes: WorkerHandshake, sizes: KVGeometry | None = None, **settings: Any
) -> SchedulerSide:
    """A scheduler whose workers have reported; one worker, unless said otherwise."""
    scheduler = waiting_side(len(handshakes) or 1, sizes, **settings)
    scheduler.set_workers([*handshakes] or [HANDSHAKE])
    return scheduler


def waiting_side(ranks: int, sizes: KVGeometry | None = None, **settings: Any) -> SchedulerSide:
    sizes = sizes or SIZES
    config = Config(bucket="bucket", **settings)
    return SchedulerSide(config, sizes, may_load=True, may_save=True, world_size=ranks)


def request(name: str, chunks: int = 2, **more: Any) -> Any:
    hashes = [f"{name}-{block}".encode() for block in range(2 * chunks)]
    return given(hashes, request_id=name, **more)


def step(tokens: int = 0, *new: Any) -> Any:
    """A step that computes all 64 tokens of each new request."""
    cached = SimpleNamespace(
        req_ids=[], resumed_req_ids=set(), new_block_ids=[], num_computed_tokens=[]
    )
    rows = [
        SimpleNamespace(
            req_id=one.request_id,
            mm_features=one.mm_features,
            block_ids=(BLOCKS,),
            num_computed_tokens=0,
        )
        for one in new
    ]
    return SimpleNamespace(
        num_scheduled_tokens={one.request_id: 64 for one in new},
        total_num_scheduled_tokens=tokens or 64 * len(new),
        scheduled_new_reqs=rows,
        scheduled_cached_reqs=cached,
        kv_cache_block_copies=None,
        new_block_ids_to_zero=None,
    )


def output(ends: Sequence[JobEnd] = (), **more: Any) -> KVConnectorOutput:
    report = StepReport(number=more.pop("number", None))
    for end in ends:
        report.add(end)
    return KVConnectorOutput(kv_connector_worker_meta=WorkerReport(report, **more))


def ended(plan: StepPlan, *outcomes: Outcome) -> list[JobEnd]:
    fetches = fetches_of(plan)
    return [
        JobEnd(fetch.job_id, JobKind.FETCH, outcome, 9, 0.1)
        for fetch, outcome in zip(fetches, outcomes, strict=True)
    ]


def looked_up(scheduler: SchedulerSide, subject: Any) -> Any:
    scheduler.on_new_request(subject)
    return scheduler.lookup(subject, 0)


def admitted(scheduler: SchedulerSide, subject: Any) -> Any:
    blocks: Any = SimpleNamespace(get_block_ids=lambda: (BLOCKS,))
    scheduler.admitted(subject, blocks, 0)
    return step(64, subject)


def fetched(scheduler: SchedulerSide, plan: StepPlan | None = None) -> set[ChunkKey]:
    return {fetch.key for fetch in fetches_of(plan or scheduler.plan(step()))}


def stats(scheduler: SchedulerSide) -> dict[str, Any]:
    found = scheduler.stats()
    return {} if found is None else found.data


def test_the_time_of_a_step_is_known_although_idle_steps_are_not_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler, now_s = side(), 100.0
    monkeypatch.setattr(kv_scheduler.time, "monotonic", lambda: now_s)
    for _ in range(3):
        assert scheduler.plan(step()).number is None, "an idle step is not measured"
        number = scheduler.planner.pace.step_started(now_s, 1_000)
        now_s += 0.5
        scheduler.on_output(output(number=number))
    assert scheduler.planner.pace.prefill_tokens_per_s == pytest.approx(2_000)
    assert scheduler.broken is None


def test_workers_linger_only_while_the_engine_can_do_nothing_else() -> None:
    scheduler = side()
    assert looked_up(scheduler, request("r")) == (None, False)
    first = scheduler.plan(step())
    # The step before the first idle one may still be running.
    pauses = [first, *(scheduler.plan(step(tokens)) for tokens in (0, 5, 0, 0))]
    assert [plan.linger_s > 0 for plan in pauses] == [False, True, False, False, True]
    scheduler.on_output(output(ended(first, Outcome.MISSING, Outcome.MISSING)))
    assert scheduler.plan(step()).linger_s == 0, "nothing is in flight"
    assert scheduler.broken is None


def test_a_busy_engine_does_not_look_through_its_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, looks = side(), list[Any]()
    monkeypatch.setattr(KVPlanner, "has_arrivals_inflight", property(looks.append))
    for tokens, looked in [(5, 0), (0, 0), (0, 1), (5, 1)]:
        scheduler.plan(step(tokens) if tokens else step())
        assert len(looks) == looked


def test_a_bug_turns_the_cache_off_and_strands_no_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = side()
    subject = request("r")
    looked_up(scheduler, subject)
    # The engine never takes more than it was offered; the planner raises an AssertionError.
    scheduler.admitted(subject, SimpleNamespace(get_block_ids=lambda: ([0, 1],)), 32)  # type: ignore[arg-type]
    assert scheduler.broken == "_admitted"
    assert "runs without its cache until a restart" in caplog.text
    assert scheduler.plan(step()).abandons == ("r",), "the load it waits for will not come"
    assert scheduler.plan(step()).abandons == ()
    scheduler.planner.ledger._saving_blocks = {5: (7, 8), 6: (8,)}
    assert scheduler.plan(step()).fences == (7, 8), "the engine gives their blocks to others"
    assert scheduler.reset(), "an engine that falls asleep insists on it"
    assert scheduler.lookup(request("other"), 0) == (0, False)
    assert scheduler.bucket_tokens(subject, 32) == 0
    scheduler.on_finished(subject)
    assert stats(scheduler)["internal_errors"] == 1
    second = side()
    monkeypatch.setattr(kv_scheduler, "host_gauges", None)
    second.stats()
    assert second.broken == "_read_gauges"
    assert stats(second)["internal_errors"] == 1


@pytest.mark.parametrize("local_tokens", [0, 32, 64])
def test_a_request_of_unknown_content_has_no_cache(local_tokens: int) -> None:
    scheduler = side()
    subject = request("r", mm_features=[without_tensors("my-cat.png")])
    scheduler.on_new_request(subject)
    assert scheduler.lookup(subject, local_tokens) == (0, False)
    assert stats(scheduler)["requests_untrusted"] == 1
    plan = scheduler.plan(step())
    assert (fetches_of(plan), plan.saves) == ((), ())
    scheduler.on_finished(subject)
    check(scheduler.planner)
    assert scheduler.broken is None


PRIVATE = {"s3kv": {"save": False}}


@pytest.mark.parametrize(
    ("params", "saved", "warning"),
    [(PRIVATE, 0, ""), (None, 2, ""), ({"s3kv": {"saev": False}}, 0, "nothing of request r")],
)
def test_a_requests_own_limits_on_saves_hold(
    params: Any, saved: int, warning: str, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = side()
    subject = request("r", kv_transfer_params=params, skip_reading_prefix_cache=True)
    assert looked_up(scheduler, subject) == (0, False)
    assert len(scheduler.plan(admitted(scheduler, subject)).saves) == saved
    assert [warning in message for message in caplog.messages] == [True] * bool(warning)
    assert scheduler.planner.counters["unreadable_params"] == bool(warning)
    assert scheduler.broken is None


def test_a_request_that_must_not_load_requests_nothing_from_the_bucket() -> None:
    scheduler = side()
    assert looked_up(scheduler, request("r", kv_transfer_params={"s3kv": {"load": False}}))[0] == 0
    assert not fetched(scheduler)


def test_a_prompt_that_another_connector_loads_waits_for_nothing_until_that_has_failed() -> None:
    """`MultiConnector` has it wait for ours, too. NIXL takes the mark away when it begins."""
    scheduler, params = side(), {"do_remote_prefill": True}
    subject = request("r", kv_transfer_params=params)
    assert looked_up(scheduler, subject) == (0, False)
    assert not fetched(scheduler)
    admitted(scheduler, subject)
    params["do_remote_prefill"] = False
    assert scheduler.lookup(subject, 0) == (None, False)
    assert fetched(scheduler)


def test_a_request_that_shares_a_name_with_another_image_is_no_longer_saved() -> None:
    scheduler = side()
    steps = []
    for name, value in (("r", 1.0), ("planted", 2.0)):
        features = [picture("ab" * 32, value=value)]
        subject = request(name, mm_features=features, skip_reading_prefix_cache=True)
        assert looked_up(scheduler, subject) == (0, False)
        steps.append(admitted(scheduler, subject))
    assert scheduler.planner._requests["r"].saving.is_barred, "at once, before the next plan"
    assert [scheduler.plan(one).saves for one in steps] == [(), ()]
    assert scheduler.broken is None
    check(scheduler.planner)


def test_a_session_is_barred_when_it_is_computed_with_media_that_came_later() -> None:
    scheduler = side()
    session = request("session", resumable=True, skip_reading_prefix_cache=True)
    looked_up(scheduler, session)
    session.mm_features.append(picture("ab" * 32))
    assert scheduler.plan(admitted(scheduler, session)).saves == ()
    assert scheduler.planner._requests["session"].saving.is_barred


def test_an_engine_that_miscounts_sessions_saves_nothing_once_there_is_one() -> None:
    config = Config(bucket="bucket")
    may: dict[str, Any] = {"may_load": True, "may_save": True, "miscounts_sessions": True}
    scheduler = SchedulerSide(config, SIZES, **may)
    scheduler.set_workers([HANDSHAKE])
    for name, more, saves in (("a", {}, 2), ("b", {"resumable": True}, 0), ("c", {}, 0)):
        subject = request(name, skip_reading_prefix_cache=True, **more)
        looked_up(scheduler, subject)
        assert len(scheduler.plan(admitted(scheduler, subject)).saves) == saves


def test_a_private_turn_of_a_session_is_not_saved() -> None:
    """vLLM keeps the first turn's parameters in the request."""
    scheduler = side()
    session = request("session", resumable=True, skip_reading_prefix_cache=True)
    looked_up(scheduler, session)
    private = {"kv_transfer_params": {"s3kv": {"save": False}}}
    session.sampling_params = SimpleNamespace(extra_args=private)
    assert scheduler.plan(admitted(scheduler, session)).saves == ()


def test_misses_and_the_content_of_memory_are_counted() -> None:
    handshakes = HANDSHAKE, WorkerHandshake("n" * 32, 8, 8192)
    scheduler, slot = side(*handshakes), 4096 + 8192
    first = stats(scheduler)
    assert first["slab_bytes|free"] == 8 * slot, "of both ranks"
    assert (first["breaker|closed"], first["breaker|open"]) == (1, 0)
    assert scheduler.stats() is None, "nothing has happened"
    assert looked_up(scheduler, request("r")) == (None, False)
    found = stats(scheduler)
    assert found["fetches"] == 2
    assert (found["slab_bytes|free"], found["slab_bytes|filling"]) == (6 * slot, 2 * slot)
    ends = ended(scheduler.plan(step()), Outcome.OK, Outcome.CORRUPT)
    assert scheduler.stats() is None
    for _ in handshakes:
        scheduler.on_output(output(ends))
    arrived = stats(scheduler)
    assert arrived["misses|corrupt"] == 1, "once, not once per rank"
    assert "fetch_ok" not in arrived, "the ranks report it"
    assert arrived["slab_bytes|clean"] == arrived["slab_pinned_bytes"] == slot
    scheduler.on_finished(request("r"))
    assert stats(scheduler) == {"slab_pinned_bytes": 0}
    assert scheduler.broken is None


def test_workers_that_report_the_same_again_change_nothing() -> None:
    """vLLM 0.33 has them do so at every wake-up, after a reset that has to outlive it."""
    scheduler, fresh = side(), side()
    planner = scheduler.planner
    assert scheduler.reset()
    scheduler.set_workers([HANDSHAKE])
    assert scheduler.planner is planner
    for one in (scheduler, fresh):
        looked_up(one, request("r"))
    before, after = fetched(fresh), fetched(scheduler)
    assert len(before) == len(after) == 2
    assert not before & after


@pytest.mark.parametrize(
    "handshakes", [[], [WorkerHandshake("n" * 32, 9, 4096)], [WorkerHandshake("m" * 32, 8, 4096)]]
)
def test_other_workers_than_at_the_start_are_refused(handshakes: list[WorkerHandshake]) -> None:
    with pytest.raises(UnsupportedError, match="not those that the engine started with"):
        side().set_workers(handshakes)


def late_side(world_size: int = 2) -> SchedulerSide:
    """A scheduler that gets the reports of its workers in steps."""
    scheduler = waiting_side(world_size)
    scheduler.set_workers([])
    return scheduler


@pytest.mark.parametrize("at_once", [True, False])
def test_workers_that_report_in_the_first_step_are_served_from_then_on(at_once: bool) -> None:
    scheduler = late_side()
    early, late = request("early"), request("late")
    assert looked_up(scheduler, early) == (0, False)
    assert scheduler.plan(step()) == StepPlan()
    reports = [(HANDSHAKE, HANDSHAKE), ()] if at_once else [(HANDSHAKE,), (HANDSHAKE,)]
    for handshakes, slots in zip(reports, (8 if at_once else 1, 8), strict=True):
        scheduler.on_output(output(handshakes=handshakes))
        assert scheduler.planner.ledger.table.count == slots
    assert scheduler.lookup(early, 0) == (0, False)
    assert looked_up(scheduler, late) == (None, False)
    assert len(fetched(scheduler)) == 2
    scheduler.on_finished(early)
    scheduler.set_workers([])  # at a wake-up
    assert scheduler.broken is None


def test_a_reset_before_the_workers_report_is_kept() -> None:
    keys = []
    for resets in (False, True):
        scheduler = late_side(world_size=1)
        if resets:
            assert scheduler.reset()
        scheduler.on_output(output(handshakes=(HANDSHAKE,)))
        looked_up(scheduler, request("r"))
        keys.append(fetched(scheduler))
        assert scheduler.broken is None
    assert len(keys[0]) == len(keys[1]) == 2
    assert not keys[0] & keys[1]


def test_workers_that_do_not_fit_turn_the_cache_off(caplog: pytest.LogCaptureFixture) -> None:
    scheduler = late_side()
    scheduler.on_output(output(handshakes=(HANDSHAKE, WorkerHandshake("m" * 32, 8, 4096))))
    assert scheduler.broken == "on_output"
    assert "the ranks disagree on the namespace" in caplog.text
    assert scheduler.lookup(request("r"), 0) == (0, False)
    with pytest.raises(UnsupportedError, match="1 of 2 workers reported"):
        waiting_side(2).set_workers([HANDSHAKE])


def test_after_a_worker_has_failed_nothing_is_offered() -> None:
    scheduler = side()
    waiting = request("r")
    assert looked_up(scheduler, waiting) == (None, False)
    report = WorkerReport(StepReport()).aggregate(WorkerReport(StepReport(), broken=True))
    scheduler.on_output(KVConnectorOutput(kv_connector_worker_meta=report))
    assert scheduler.broken is not None
    assert scheduler.lookup(waiting, 0) == (0, False)
    assert scheduler.plan(step()) == StepPlan()


def test_an_object_has_room_for_its_longest_shard() -> None:
    """Pages instead of slots where there are objects of several lengths."""
    window = Coverage(16, 32, SlidingWindow(20), 1, (0,))
    scheduler = side(
        WorkerHandshake("n" * 32, 64, 4096, (9_000, 5_000)),
        WorkerHandshake("n" * 32, 80, 4096, (8_000, 13_000)),
        sizes=KVGeometry(16, 16, 32, (Coverage(16, 32, members=(1,)), window)),
    )
    table = scheduler.planner.ledger.table
    assert table.count == 64
    for group, pages in ((0, 3), (1, 4)):
        assert table.reserve(ChunkKey(group, b"k" * 32)).entry.units == pages


ADAPTER = LoRARequest("a", 1, "/nowhere")
LOADED = LoadedAdapter(hashed_name(ADAPTER), b"content")
RELOADED = LoadedAdapter(LOADED.name, b"other")


class AdaptedEngine:
    """A scheduler whose steps are numbered, as the connector numbers them."""

    def __init__(self, *loaded: LoadedAdapter, **settings: Any) -> None:
        self.scheduler = side(**settings)
        if loaded:
            self.plan()
            self.report(1, *loaded)

    def plan(self, scheduled: Any = None) -> StepPlan:
        plan = self.scheduler.plan(scheduled or step())
        self.scheduler.adapters.next_step()
        return plan

    def report(self, number: int, *loaded: LoadedAdapter) -> None:
        adapters = AdapterReport(number, dict(zip([1], loaded, strict=False)))
        self.scheduler.on_output(output(adapters=adapters))

    def new(self, name: str, **more: Any) -> Any:
        subject = request(name, **{"lora_request": ADAPTER, **more})
        self.scheduler.on_new_request(subject)
        return subject


def test_a_request_with_an_adapter_waits_for_the_workers_report() -> None:
    engine = AdaptedEngine(max_wait_ms=0)
    scheduler, subject = engine.scheduler, engine.new("r")
    assert scheduler.lookup(subject, 0) == (None, False)
    assert not fetched(scheduler, engine.plan()), "the keys are unknown"
    engine.report(1)
    assert scheduler.lookup(subject, 0) == (0, False), "it is not loaded yet"
    plan = engine.plan(admitted(scheduler, subject))
    assert (fetches_of(plan), plan.saves) == ((), ())
    engine.report(2, LOADED)
    later = engine.new("later")
    assert scheduler.lookup(later, 0) == (None, False)
    keys = fetched(scheduler, engine.plan())
    assert len(keys) == 2, "at once, for the adapter last reported"
    assert not {key.block_hash for key in keys} & set(later.block_hashes)
    plain = engine.new("plain", lora_request=None)
    assert scheduler.lookup(plain, 0) == (0, False), "without an adapter it does not wait"
    for one in (subject, later, plain):
        scheduler.on_finished(one)
    assert scheduler.broken is None


@pytest.mark.parametrize("loaded", [(), (RELOADED,)])
def test_an_adapter_that_was_loaded_again_before_the_request_came(loaded: Any) -> None:
    """Between two steps."""
    engine = AdaptedEngine(LOADED)
    scheduler, subject = engine.scheduler, engine.new("r")
    assert scheduler.lookup(subject, 0) == (None, False)
    believed = fetched(scheduler, engine.plan())
    assert len(believed) == 2
    engine.report(2, *loaded)
    answer = scheduler.lookup(subject, 0)
    plan = engine.plan()
    keys = fetched(scheduler, plan)
    assert len(plan.cancels) == 2
    assert not keys & believed
    assert (answer, len(keys)) == (((None, False), 2) if loaded else ((0, False), 0))
    scheduler.on_finished(subject)
    assert scheduler.broken is None


def test_a_request_that_runs_across_a_load_is_no_longer_saved() -> None:
    engine = AdaptedEngine(LOADED)
    subjects = [engine.new("across"), engine.new("alone", skip_reading_prefix_cache=True)]
    for subject in subjects:
        engine.scheduler.lookup(subject, 0)
    engine.plan()
    engine.report(2, LOADED)
    scheduled = [admitted(engine.scheduler, subject) for subject in subjects]
    engine.report(2, RELOADED)
    for one in scheduled:
        assert engine.plan(one).saves == ()
    check(engine.scheduler.planner)
    assert engine.scheduler.broken is None


def test_a_private_request_that_is_entered_again_stays_private() -> None:
    engine = AdaptedEngine(LOADED)
    subject = engine.new("r", kv_transfer_params=PRIVATE)
    engine.scheduler.lookup(subject, 0)
    engine.plan()
    engine.report(2, RELOADED)
    engine.scheduler.lookup(subject, 64)
    assert engine.scheduler.planner.request("r").limits.save_tokens == 0
    assert engine.scheduler.broken is None
