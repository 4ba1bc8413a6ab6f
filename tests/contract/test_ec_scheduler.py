"""The scheduler's side of the EC connector, driven by hand."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from lab.books import check
from s3kv.config import Config
from s3kv.connectors.ec_scheduler import ECSchedulerSide, reset_items
from s3kv.connectors.ec_translate import ItemWorkerReport
from s3kv.host.room import PAGE_BYTES
from s3kv.host.slab import Slab
from s3kv.messages import BucketJob, ItemReport, JobEnd, JobKind
from s3kv.objects.item_format import ItemFormat, object_bytes
from s3kv.place import Place
from s3kv.types import ItemShape, Outcome
from tests.contract.pictures import picture
from tests.contract.test_ec_translate import HASH, feature, request, vllm_config
from tests.unit.planning.ec_desk import WIDTH


@pytest.fixture(autouse=True)
def without_io_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests end the fetches."""
    monkeypatch.setattr(ECSchedulerSide, "_start", lambda self, may_save: None)


def make_side(**engine: Any) -> ECSchedulerSide:
    config = Config(bucket="bkt", host_bytes=2**22)
    return ECSchedulerSide(config, vllm_config(**engine), may_load=True, may_save=True)


@pytest.fixture
def side() -> ECSchedulerSide:
    return make_side()


def arrive(side: ECSchedulerSide, one: Any) -> None:
    """A request whose items are in the bucket."""
    assert not side.ensure(one, 0)
    for job in side.planner.take_fetches():
        nbytes = 4096 + job.item.rows * WIDTH * 2
        side.planner.on_end(JobEnd(job.job_id, JobKind.FETCH, Outcome.OK, nbytes, 0.1), 0.0)
    assert side.ensure(one, 0)


def output(tokens: int = 1) -> Any:
    return SimpleNamespace(total_num_scheduled_tokens=tokens, free_encoder_mm_hashes=[])


def data(side: ECSchedulerSide) -> dict[str, Any] | None:
    stats = side.stats()
    return None if stats is None else stats.data


def test_a_prefix_that_covers_the_image_needs_no_image(side: ECSchedulerSide) -> None:
    one = request("r", feature(offset=10, length=100))
    assert side.ensure(one, 110)
    assert side.planner.take_fetches() == []
    two = request("s", feature(offset=10, length=100))
    assert not side.ensure(two, 109), "the last token of it has yet to be computed"


def test_a_prefix_that_is_gone_while_the_request_waits_is_noticed(side: ECSchedulerSide) -> None:
    """Then it needs an item it did not need in the pass before."""
    one = request("r", feature(HASH, offset=0), feature("cd" * 32, offset=200))
    for computed_tokens in (150, 0):
        assert not side.ensure(one, computed_tokens)
        assert len(side.planner.take_fetches()) == 1


def test_a_prefix_that_is_gone_after_all_was_there_is_noticed(side: ECSchedulerSide) -> None:
    """Because of a preemption, say, or of a failed load of KV."""
    one = request("r", feature())
    assert side.ensure(one, 100)
    arrive(side, one)


def test_a_promised_item_is_loaded_even_if_everything_else_breaks(
    side: ECSchedulerSide, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one = request("r", feature())
    arrive(side, one)
    assert side.has(HASH)
    monkeypatch.setattr(side.planner, "allocated", Mock(side_effect=KeyError("a bug")))
    side.allocated(one, 0)
    assert side.broken == "_allocated"
    assert side.has(HASH), "an answer of this pass holds to its end"
    assert [load.identifier for load in side.plan(output()).loads] == [HASH]
    assert not side.has(HASH)
    assert side.plan(output()).loads == ()
    assert side.ensure(request("s", feature("cd" * 32)), 0)
    side.on_finished(one)
    assert "without its cache" in caplog.text
    assert (data(side) or {})["internal_errors"] == 1


def test_a_load_is_pinned_until_any_device_has_made_it(side: ECSchedulerSide) -> None:
    """A step of `MMEncoderModelRunner` ends when the device has begun the one `depth` before it,
    and as many may be under way."""
    one, depth, pinned = request("r", feature()), vllm_config().max_concurrent_batches, []
    arrive(side, one)
    assert side.has(HASH)
    side.allocated(one, 0)
    side.plan(output())
    side.on_finished(one)
    for _ in range(2 * depth + 1):
        side.plan(output())
        pinned.append(bool(side.planner.ledger.table.statistics().pinned))
    assert pinned == [True] * 2 * depth + [False]


def test_a_request_that_has_all_it_needs_costs_a_dictionary_read(side: ECSchedulerSide) -> None:
    one = request("r", feature())
    arrive(side, one)
    side.planner.ensure = None  # type: ignore[method-assign, assignment]
    assert side.ensure(one, 0)
    assert side.broken is None


class Client:
    def __init__(self) -> None:
        self.calls: list[str] = []
        self.pauses_s: list[float] = []

    def submit(self, job: BucketJob) -> None:
        where = f" from {job.slot}: {job.item}" if job.kind is JobKind.UPLOAD else ""
        self.calls.append(f"{job.kind.value} {job.job_id}{where}")

    def cancel(self, job_id: int) -> None:
        self.calls.append(f"cancel {job_id}")

    def flush(self) -> None:
        self.calls.append("flush")

    def poll(self, linger_s: float) -> list[Any]:
        self.calls.append("poll")
        self.pauses_s.append(linger_s)
        return []

    def take(self) -> list[str]:
        calls, self.calls = self.calls, []
        return calls


def connect(side: ECSchedulerSide, slab: Slab | None = None) -> Client:
    client = Client()
    side._tier = SimpleNamespace(client=client, slab=slab)  # type: ignore[assignment]
    return client


def test_a_pass_calls_the_io_process_once(side: ECSchedulerSide) -> None:
    """However many requests wait, and not at all while nothing is in flight."""
    client = connect(side)
    side._polled_s = time.monotonic()
    requests = [request(f"r{n}", feature(f"{n:064x}")) for n in range(3)]
    for calls in (["fetch 1", "fetch 2", "fetch 3", "flush"], ["poll", "flush"]):
        for one in requests:
            assert not side.ensure(one, 0)
        side.plan(output())
        assert client.take() == calls
    side.on_finished(requests[1])
    assert client.take() == ["cancel 2", "flush"], "there may be no further pass"


def test_an_item_in_use_and_gone_from_the_bucket_is_uploaded_again(side: ECSchedulerSide) -> None:
    """From the scheduler's memory, by the header that was verified there."""
    slab = Slab.create(2**22)
    client = connect(side, slab)
    assert not side.ensure(request("r", feature(length=100)), 0)
    (order,) = side.planner.take_fetches()
    nbytes = object_bytes("BF16", 100, WIDTH)
    layout = ItemFormat("0" * 32, "BF16", ItemShape(100, nbytes))
    slot = slab.view[order.slot * PAGE_BYTES :][:nbytes]
    layout.seal(Place.of(slot, layout.header_bytes), order.key.block_hash)
    arrived = JobEnd(order.job_id, JobKind.FETCH, Outcome.OK, nbytes, 0.1, fresh_s=0.0)
    side.planner.on_end(arrived, time.monotonic())
    assert not side.planner.ledger.uses_inflight
    assert not client.take().count("use 2")
    side.ensure(request("s", feature(length=100)), 0)
    side.plan(output())
    assert "use 2" in client.take()
    side.planner.on_end(JobEnd(2, JobKind.USE, Outcome.MISSING), time.monotonic())
    side.plan(output())
    assert f"upload 3 from {order.slot}: {ItemShape(100, nbytes)}" in client.take()
    side.planner.on_end(JobEnd(3, JobKind.UPLOAD, Outcome.OK, nbytes), time.monotonic())
    check(side.planner)
    assert side.broken is None
    slab.close()


@pytest.mark.parametrize(("ranks", "pauses"), [(1, True), (2, False)])
def test_no_idle_rank_holds_up_ranks_that_wait_for_its_step(ranks: int, pauses: bool) -> None:
    side = make_side(data_parallel_size=ranks, is_moe=True)
    client = connect(side)
    assert not side.ensure(request("r", feature()), 0)
    for _ in range(3):
        side.plan(output(tokens=0))
    assert any(client.pauses_s) == pauses
    assert side.broken is None


def test_workers_reports_reach_the_statistics(side: ECSchedulerSide) -> None:
    side.stats()
    seconds = {"upload_seconds": [0.1, 0.2]}
    counted = {"encoded": 2, "upload_ok": 2, "io_requests|PUT|2xx": 2, "saves_dropped": 1}
    report = ItemReport(counted, encoded_rows=64, seconds=seconds)
    other = ItemReport({"encoded": 1}, seconds={"upload_seconds": [0.3]})
    mine = ItemWorkerReport(report).aggregate(ItemWorkerReport(other))
    side.on_output(SimpleNamespace(ec_connector_worker_meta=mine))  # type: ignore[arg-type]
    side.on_output(SimpleNamespace(ec_connector_worker_meta=None))  # type: ignore[arg-type]
    counts = {"encoded": 3, "upload_ok": 2, "io_requests|PUT|2xx": 2}
    assert data(side) == counts | {
        "saves_dropped|memory_full": 1,
        "upload_seconds": [0.1, 0.2, 0.3],
    }
    assert data(side) is None


@pytest.mark.parametrize(
    ("params", "saved"),
    [
        (None, 1),
        ({"s3kv": {"save": False}}, 0),
        ({"s3kv": {"max_save_tokens": 109}}, 0),
        ({"s3kv": {"max_save_tokens": 110}}, 1),
        ({"s3kv": {"saev": False}}, 0),
    ],
)
def test_an_image_is_saved_if_its_kv_may_be(side: ECSchedulerSide, params: Any, saved: int) -> None:
    one = request("r", feature(offset=10, length=100), kv_transfer_params=params)
    side.ensure(one, 0)
    side.allocated(one, 0)
    assert len(side.plan(output()).saves) == saved


def test_a_request_that_must_not_load_asks_for_no_image(side: ECSchedulerSide) -> None:
    one = request("r", feature(), kv_transfer_params={"s3kv": {"load": False}})
    assert side.ensure(one, 0)
    assert side.planner.take_fetches() == []


@pytest.mark.parametrize(
    ("computed_tokens", "more"),
    [
        (0, {"kv_transfer_params": {"s3kv": {"load": False}}}),
        (50, {}),
        (0, {"lora_request": SimpleNamespace(name="an adapter")}),
    ],
    ids=["loads nothing", "has its tokens", "is not cached"],
)
def test_a_name_is_promised_to_nobody_while_a_request_means_another_image_by_it(
    side: ECSchedulerSide, computed_tokens: int, more: dict[str, Any]
) -> None:
    """vLLM asks by name alone, and would end with rows of another number."""
    side._adapts_towers = True
    arrive(side, request("r", picture("cat", length=100)))
    other = request("s", picture("cat", value=2.0, length=50), **more)
    assert side.has("cat")
    assert side.ensure(other, computed_tokens)
    assert not side.has("cat"), "nor what was promised in this pass to a request that did not fit"
    side.allocated(other, 0)
    assert side.plan(output()).loads == (), "the engine encodes it"
    side.on_finished(other)
    assert side.has("cat")
    check(side.planner)


def test_a_request_with_two_images_of_one_name_is_promised_neither(side: ECSchedulerSide) -> None:
    one = request("r", picture("cat"), picture("cat", value=2.0, offset=200))
    assert side.ensure(one, 0), "it waits for nothing that it would not be given"
    assert not side.has("cat")
    side.on_finished(one)
    assert side.planner._names == {}


def test_tenants_with_salts_share_no_item(side: ECSchedulerSide) -> None:
    """vLLM asks by name alone, so it is promised neither while both live."""
    one, other = (request(salt, feature(), cache_salt=salt) for salt in "ab")
    arrive(side, one)
    assert side.has(HASH)
    assert side.ensure(other, 0), "it waits for nothing that it would not be given"
    assert not side.has(HASH)
    side.allocated(other, 0)
    assert [save.key for save in side.plan(output()).saves] == [side._item(other, 0).key]
    assert not side.planner.take_fetches()
    side.on_finished(other)
    assert side.has(HASH)
    check(side.planner)


def test_no_item_outlives_the_encoder_that_made_it(side: ECSchedulerSide) -> None:
    """vLLM reports changed weights to the KV connector of the process."""
    arrive(side, old := request("old", feature()))
    assert not side.ensure(another := request("s", feature("x" * 64)), 0)
    reset_items()
    assert side.ensure(another, 0), "it does not wait for what it cannot use"
    assert len(side.planner.take_cancels()) == 1
    assert not side.has(HASH)
    side.allocated(old, 0)
    assert side.plan(output()).saves == ()
    side.on_finished(old)
    arrive(side, request("new", feature()))
    check(side.planner)


def test_the_log_has_a_line_when_the_first_request_has_finished(
    side: ECSchedulerSide, caplog: pytest.LogCaptureFixture
) -> None:
    one = request("r", feature())
    arrive(side, one)
    assert side.has(HASH)
    side.allocated(one, 0)
    with caplog.at_level("INFO", "s3kv"):
        side.plan(output())
        assert caplog.messages == []
        side.on_finished(one)
    (line,) = caplog.messages
    assert line.startswith("s3kv: Encoder outputs: Hit rate: 100.0% (bucket: ")
