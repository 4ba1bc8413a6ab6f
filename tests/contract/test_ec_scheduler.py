"""The scheduler's side of the EC connector, driven by hand."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from lab.books import check
from s3kv.config import Config
from s3kv.connectors.ec_scheduler import ECSchedulerSide
from s3kv.connectors.ec_translate import (
    ItemWorkerReport,
)
from s3kv.host.room import PAGE_BYTES
from s3kv.host.slab import Slab
from s3kv.messages import BucketJob, ItemReport, JobEnd, JobKind
from s3kv.objects.item_format import ItemFormat, object_bytes
from s3kv.place import Place
from s3kv.types import ItemShape, Outcome
from tests.contract.test_ec_translate import HASH, feature, request, vllm_config
from tests.unit.planning.ec_desk import WIDTH


@pytest.fixture
def side(monkeypatch: pytest.MonkeyPatch) -> ECSchedulerSide:
    """Without an I/O process: the test ends the fetches."""
    monkeypatch.setattr(ECSchedulerSide, "_start", lambda self, may_save: None)
    config = Config(bucket="bkt", host_bytes=2**22)
    return ECSchedulerSide(config, vllm_config(), may_load=True, may_save=True)


def arrive(side: ECSchedulerSide) -> None:
    for order in side.planner.take_fetches():
        assert order.item is not None
        nbytes = 4096 + order.item.rows * WIDTH * 2
        side.planner.on_end(JobEnd(order.job_id, JobKind.FETCH, Outcome.OK, nbytes, 0.1), 0.0)


def output(tokens: int = 1, freed: tuple[str, ...] = ()) -> Any:
    return SimpleNamespace(total_num_scheduled_tokens=tokens, free_encoder_mm_hashes=list(freed))


def test_a_prefix_that_covers_the_image_needs_no_image(side: ECSchedulerSide) -> None:
    one = request("r", feature(offset=10, length=100))
    assert side.ensure(one, 110)
    assert side.planner.take_fetches() == []
    two = request("s", feature(offset=10, length=100))
    assert not side.ensure(two, 109), "the last token of it has yet to be computed"


def test_what_was_promised_is_loaded_even_if_everything_else_breaks(
    side: ECSchedulerSide, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one = request("r", feature())
    assert not side.ensure(one, 0)
    arrive(side)
    assert side.ensure(one, 0)
    assert side.has(HASH)

    def fail(*args: Any) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(side.planner, "allocated", fail)
    side.allocated(one, 0)
    assert side.broken == "_allocated"
    assert side.has(HASH), "what was said in this pass holds to its end"
    plan = side.plan(output())
    assert [load.identifier for load in plan.loads] == [HASH]
    assert not side.has(HASH)
    assert side.plan(output()).loads == ()
    assert side.ensure(request("s", feature("cd" * 32)), 0)
    side.on_finished(one)
    assert "without its cache" in caplog.text
    stats = side.stats()
    assert stats is not None
    assert stats.data["internal_errors"] == 1


def test_a_request_that_has_all_it_needs_costs_a_dictionary_read(side: ECSchedulerSide) -> None:
    one = request("r", feature())
    side.ensure(one, 0)
    arrive(side)
    assert side.ensure(one, 0)
    side.planner.ensure = None  # type: ignore[method-assign, assignment]
    assert side.ensure(one, 0)
    assert side.broken is None


class Client:
    """Writes down what it is told, in the order of the I/O client's calls."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.pauses_s: list[float] = []

    def submit(self, job: BucketJob) -> None:
        where = f" from {job.slot}: {job.item}" if job.kind is JobKind.UPLOAD else ""
        self.told.append(f"{job.kind.value} {job.job_id}{where}")

    def cancel(self, job_id: int) -> None:
        self.told.append(f"cancel {job_id}")

    def flush(self) -> None:
        self.told.append("flush")

    def poll(self, linger_s: float) -> list[Any]:
        self.told.append("poll")
        self.pauses_s.append(linger_s)
        return []

    def take(self) -> list[str]:
        told, self.told = self.told, []
        return told


def test_a_pass_speaks_to_the_io_process_once(side: ECSchedulerSide) -> None:
    """However many requests ask, and not at all while they only wait for what was asked."""
    client = Client()
    side._tier = SimpleNamespace(client=client, slab=None)  # type: ignore[assignment]
    side._polled_s = time.monotonic()
    requests = [request(f"r{n}", feature(f"{n:064x}")) for n in range(3)]
    for one in requests:
        assert not side.ensure(one, 0)
    assert client.take() == [], "nothing was under way, so there was nothing to hear"
    side.plan(output())
    assert client.take() == ["fetch 1", "fetch 2", "fetch 3", "flush"]
    for one in requests:
        assert not side.ensure(one, 0)
    side.plan(output())
    assert client.take() == ["poll", "flush"]
    side.on_finished(requests[1])
    assert client.take() == ["cancel 2", "flush"], "there may be no further pass"


def test_an_item_in_use_that_is_gone_from_the_bucket_is_uploaded_again(
    side: ECSchedulerSide,
) -> None:
    """From the scheduler's memory, by the header that was verified there."""
    client, slab = Client(), Slab.create(2**22)
    side._tier = SimpleNamespace(client=client, slab=slab)  # type: ignore[assignment]
    one = request("r", feature(length=100))
    assert not side.ensure(one, 0)
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


@pytest.mark.parametrize(
    ("ranks", "is_moe", "pauses"), [(1, True, True), (2, False, True), (2, True, False)]
)
def test_no_idle_rank_holds_up_ranks_that_wait_for_its_step(
    monkeypatch: pytest.MonkeyPatch, ranks: int, is_moe: bool, pauses: bool
) -> None:
    monkeypatch.setattr(ECSchedulerSide, "_start", lambda self, may_save: None)
    config = Config(bucket="bkt", host_bytes=2**22)
    engine = vllm_config(data_parallel_size=ranks, is_moe=is_moe)
    side = ECSchedulerSide(config, engine, may_load=True, may_save=True)
    client = Client()
    side._tier = SimpleNamespace(client=client, slab=None)  # type: ignore[assignment]
    assert not side.ensure(request("r", feature()), 0)
    for _ in range(3):
        side.plan(output(tokens=0))
    assert any(client.pauses_s) == pauses
    assert side.broken is None


def test_a_prefix_that_is_gone_while_the_request_waits_is_noticed(side: ECSchedulerSide) -> None:
    """Then it needs an item it did not need in the pass before."""
    one = request("r", feature(HASH, offset=0), feature("cd" * 32, offset=200))
    assert not side.ensure(one, 150)
    assert len(side.planner.take_fetches()) == 1
    assert not side.ensure(one, 0)
    assert len(side.planner.take_fetches()) == 1


def test_workers_reports_reach_the_statistics(side: ECSchedulerSide) -> None:
    side.stats()
    seconds = {"upload_seconds": [0.1, 0.2]}
    counted = {"encoded": 2, "upload_ok": 2, "io_requests|PUT|2xx": 2, "saves_dropped": 1}
    report = ItemReport(counted, encoded_rows=64, seconds=seconds)
    other = ItemReport({"encoded": 1}, seconds={"upload_seconds": [0.3]})
    mine = ItemWorkerReport(report).aggregate(ItemWorkerReport(other))
    side.on_output(SimpleNamespace(ec_connector_worker_meta=mine))  # type: ignore[arg-type]
    side.on_output(SimpleNamespace(ec_connector_worker_meta=None))  # type: ignore[arg-type]
    stats = side.stats()
    assert stats is not None
    told = {"encoded": 3, "upload_ok": 2, "io_requests|PUT|2xx": 2, "saves_dropped|memory_full": 1}
    assert stats.data == told | {"upload_seconds": [0.1, 0.2, 0.3]}
    assert side.stats() is None


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
def test_an_image_is_saved_if_its_tokens_may_be(
    side: ECSchedulerSide, params: Any, saved: int
) -> None:
    one = request("r", feature(offset=10, length=100))
    one.kv_transfer_params = params
    side.ensure(one, 0)
    side.allocated(one, 0)
    assert len(side.plan(output()).saves) == saved


def test_a_request_that_must_not_load_asks_for_no_image(side: ECSchedulerSide) -> None:
    one = request("r", feature())
    one.kv_transfer_params = {"s3kv": {"load": False}}
    assert side.ensure(one, 0)
    assert side.planner.take_fetches() == []


def test_the_log_tells_of_the_first_request_when_it_has_finished(
    side: ECSchedulerSide, caplog: pytest.LogCaptureFixture
) -> None:
    one = request("r", feature())
    assert not side.ensure(one, 0)
    arrive(side)
    assert side.ensure(one, 0)
    assert side.has(HASH)
    side.allocated(one, 0)
    with caplog.at_level("INFO", "s3kv"):
        side.plan(output())
        assert caplog.messages == []
        side.on_finished(one)
    (line,) = caplog.messages
    assert line.startswith("s3kv: Encoder outputs: Hit rate: 100.0% (bucket: ")
