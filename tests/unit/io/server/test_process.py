"""The I/O process's loop, served inside the test, against stores that wait, fail or lie."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from lab.memory_store import MemoryStore
from s3kv.config import Config
from s3kv.errors import (
    ConfigError,
    StoreDenied,
    StoreError,
    StoreMissing,
    StoreRefused,
    StoreUnavailable,
)
from s3kv.host.slab import Slab
from s3kv.io import wire
from s3kv.messages import BucketJob, JobKind
from s3kv.objects.keys import Namespace
from s3kv.place import Place
from s3kv.stores.store import ObjectInfo, Receiver
from s3kv.types import ChunkKey, ItemShape, Outcome
from tests.servers import set_credentials
from tests.unit.io import rig
from tests.unit.io.rig import served


class GatedStore(MemoryStore):
    """Says which operations have begun, in order, and holds each until `open_gate`.

    A held read has already put its first bytes into the buffer, and once cancelled it writes a
    last time before it ends, as a connection being torn down might.
    """

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[tuple[str, str]] = []
        self.unwound = asyncio.Event()
        self.unwound.set()
        self.closed = False
        self._gate = asyncio.Event()

    def open_gate(self) -> None:
        self._gate.set()

    async def get_into(
        self, key: str, place: Place, receiver: Receiver | None = None, first: int | None = None
    ) -> ObjectInfo | None:
        self.begun.append(("get", key))
        place.write(b"part")
        try:
            await self._gate.wait()
        finally:
            await self.unwound.wait()
            place.write(b"last")
        return await super().get_into(key, place, receiver, first)

    async def put(self, key: str, place: Place, *, if_absent: bool) -> bool:
        self.begun.append(("put", key))
        await self._gate.wait()
        return await super().put(key, place, if_absent=if_absent)

    async def close(self) -> None:
        self.closed = True


async def test_huge_pages_are_asked_for_before_the_slab_is_allocated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[str] = []
    monkeypatch.setattr(Slab, "ask_for_huge_pages", lambda self: log.append("ask"))
    prefault = Slab.prefault

    def watched(self: Slab, stop: Callable[[], bool]) -> None:
        log.append("prefault")
        prefault(self, stop)

    monkeypatch.setattr(Slab, "prefault", watched)
    async with rig.serving(MemoryStore()) as (worker, serving):
        worker.hang_up()
        await serving
    assert log == ["ask", "prefault"]


@pytest.mark.parametrize("words", ["no file /tmp/\udcff", "\U0001f600" * 1000])
async def test_a_job_ends_whatever_its_error_says(words: str) -> None:
    store = MemoryStore(
        errors={"check": [StoreUnavailable(words)], "get_into": [StoreError(words)]}
    )
    settings = {"on_unavailable": "serve", "max_attempts": 1}
    async with served(lambda _: store, **settings) as (worker, _):
        answer = await worker.hear()
        assert isinstance(answer, wire.Ready)
        assert (answer.trouble, answer.message[:5]) == ("unavailable", words[:5])
        assert (await worker.end_of(rig.fetch(1))).outcome is Outcome.FAILED
        await worker.settled()


async def test_a_drain_hurries_the_uploads() -> None:
    store = GatedStore()
    async with rig.serving(store, max_inflight_requests=8) as (worker, _):
        worker.say(*(rig.upload(i) for i in range(5)))
        assert (await worker.settled()).running == 1
        worker.say(wire.Drain(60.0))
        assert (await worker.settled()).running == 4
        store.open_gate()
        assert len(await worker.done(5)) == 5


async def test_a_waiting_job_is_cancelled_at_once() -> None:
    store = GatedStore()
    async with rig.serving(store, max_inflight_requests=1) as (worker, _):
        worker.say(rig.fetch(1), rig.fetch(2), wire.Cancel(2))
        assert (await worker.done(1))[2].outcome is Outcome.CANCELLED
        assert len(store.begun) == 1


async def test_a_running_fetch_is_done_only_when_it_writes_no_more() -> None:
    store = GatedStore()
    async with rig.serving(store) as (worker, _):
        store.unwound.clear()
        worker.say(rig.fetch(1), rig.fetch(2))
        await worker.settled()
        assert bytes(worker.slot(1)[:4]) == b"part"
        worker.say(wire.Cancel(1), wire.Cancel(1))
        stats = await worker.settled()  # and no Done before it
        assert stats.running == 2
        store.unwound.set()
        assert (await worker.done(1))[1].outcome is Outcome.CANCELLED
        assert bytes(worker.slot(1)[:4]) == b"last"
        worker.slot(1)[:4] = b"mine"
        store.open_gate()
        await worker.done(1)
        assert bytes(worker.slot(1)[:4]) == b"mine"


async def test_a_job_cancelled_in_the_same_breath_ends_once() -> None:
    """A task cancelled before its first step never runs a line of its coroutine."""
    async with rig.serving(MemoryStore()) as (worker, _):
        for i in range(50):
            worker.say(rig.fetch(i), wire.Cancel(i), wire.Cancel(i))
        ends = await worker.done(50)
        assert {end.outcome for end in ends.values()} <= {Outcome.CANCELLED, Outcome.MISSING}
        assert Outcome.CANCELLED in {end.outcome for end in ends.values()}
        stats = await worker.settled()
        assert (stats.running, stats.waiting, stats.running_bytes) == (0, 0, 0)


@pytest.mark.parametrize(
    ("errors", "outcome", "retries"),
    [
        ([StoreUnavailable("away")], Outcome.MISSING, 1),
        ([StoreUnavailable("away")] * 2, Outcome.MISSING, 2),
        ([StoreUnavailable("away")] * 3, Outcome.FAILED, 2),
        ([StoreDenied("no s3:GetObject")], Outcome.DENIED, 0),
        ([StoreMissing("no such bucket")], Outcome.FAILED, 0),
        ([StoreRefused("too large")], Outcome.INVALID, 0),
        ([ZeroDivisionError("a defect")], Outcome.FAILED, 0),
    ],
)
async def test_errors_become_outcomes(
    errors: list[Exception], outcome: Outcome, retries: int
) -> None:
    store = MemoryStore(errors={"get_into": errors})
    async with rig.serving(store, max_attempts=3) as (worker, _):
        end = await worker.end_of(rig.fetch(1))
        stats = await worker.settled()
        assert (end.outcome, stats.counters["io_retries"]) == (outcome, retries)
        assert stats.counters["io_defects"] == isinstance(errors[0], ZeroDivisionError)
        if outcome is not Outcome.MISSING:
            assert str(errors[0]) in end.detail
        assert (await worker.end_of(rig.fetch(2))).outcome is Outcome.MISSING


@pytest.mark.parametrize(
    "message",
    [
        BucketJob(1, JobKind.FETCH, ChunkKey(7, b"\1")),
        BucketJob(1, JobKind.FETCH, ChunkKey(0, b"\1"), -1),
        BucketJob(1, JobKind.FETCH, ChunkKey(0, b"\1"), 64),
        BucketJob(1, JobKind.FETCH, ChunkKey(0, b"\1"), item=ItemShape(1, 8192)),
        BucketJob(1, JobKind.SAVE, ChunkKey(0, b"\1")),
        BucketJob(1, JobKind.UPLOAD, ChunkKey(0, b"")),
        BucketJob(1, JobKind.UPLOAD, ChunkKey(0, bytes(65))),
        BucketJob(1, JobKind.USE, ChunkKey(0, b"")),
    ],
)
async def test_a_job_that_makes_no_sense_is_invalid(message: wire.Down) -> None:
    async with rig.serving(MemoryStore()) as (worker, _):
        end = await worker.end_of(message)
        assert end.outcome is Outcome.INVALID
        assert end.detail


@pytest.mark.parametrize(
    "messages", [[rig.fetch(1), rig.fetch(1)], [rig.handshake(Config(bucket="bkt"))]]
)
async def test_a_worker_out_of_order_ends_the_process(messages: list[wire.Down]) -> None:
    async with rig.serving(GatedStore()) as (worker, serving):
        worker.say(*messages)
        with pytest.raises(wire.WireError):
            await serving


TROUBLES = [
    (StoreDenied("no s3:ListBucket"), "denied"),
    (StoreMissing("no bucket"), "missing"),
    (StoreUnavailable("refused"), "unavailable"),
]


@pytest.mark.parametrize("serves", [False, True])
@pytest.mark.parametrize(("error", "trouble"), TROUBLES)
async def test_a_bucket_in_trouble_ends_the_process_unless_told_to_serve(
    error: StoreError, trouble: wire.Trouble, serves: bool
) -> None:
    settings = {"max_attempts": 1, "on_unavailable": "serve"} if serves else {"max_attempts": 2}
    store = MemoryStore(errors={"check": [error] * (1 if serves else 9)})
    async with served(lambda _: store, **settings) as (worker, serving):
        worker.say(rig.fetch(1))
        assert await worker.hear() == wire.Ready(serves, trouble, str(error))
        if serves:
            assert (await worker.done(1))[1].outcome is Outcome.MISSING
        else:
            assert await worker.hear() is None
            await serving


async def test_it_says_whether_the_namespace_has_objects() -> None:
    store = MemoryStore()
    other = Namespace(rig.NAMESPACE.prefix, "f" * 32)
    await store.put(other.manifest, Place.of(b"{}"), if_absent=True)
    for known in (False, True):
        async with served(lambda _: store) as (worker, _):
            assert await worker.hear() == wire.Ready(True, None, "", known)
        await store.put(rig.object_key(1), Place.of(b"1"), if_absent=True)


@pytest.mark.parametrize("words", ["region is missing", "KMS says \ud800"])
async def test_a_store_that_cannot_be_made_names_the_setting(words: str) -> None:
    def make_store(config: Config) -> MemoryStore:
        raise ConfigError(words)

    async with served(make_store, on_unavailable="serve") as (worker, serving):
        answer = await worker.hear()
        assert (answer.serving, answer.trouble) == (False, "config")
        assert answer.message[:9] == words[:9]
        await serving


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ("", "S3KV_ENCRYPTION_KEYS holds 0 words"),
        ("0123", "word 1 is not a key"),
        ("kms:" + 30 * "AAAA", "KMS does not decrypt it: Could not connect"),
    ],
)
async def test_without_its_keys_an_engine_does_not_serve(
    keys: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever `on_unavailable` says: it is about the bucket, and plain objects are no way out."""
    set_credentials(monkeypatch)
    monkeypatch.setenv("S3KV_ENCRYPTION_KEYS", keys)
    monkeypatch.setenv("AWS_ENDPOINT_URL_KMS", "http://127.0.0.1:1")
    store = MemoryStore()
    settings = {"on_unavailable": "serve", "encryption": "aes-gcm", "region": "us-east-1"}
    async with served(lambda _: store, **settings) as (worker, serving):
        worker.fill(1, number=1)
        worker.say(rig.upload(1))
        ready = await worker.hear()
        assert (ready.serving, ready.trouble) == (False, "config")
        assert said in ready.message
        assert await worker.hear() is None
        await serving
    assert not store.asked


async def test_a_defect_in_every_job_is_logged_once_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = MemoryStore(errors={"get_into": [ZeroDivisionError("a defect")] * 5})
    async with rig.serving(store) as (worker, _):
        for number in range(5):
            assert (await worker.end_of(rig.fetch(number))).outcome is Outcome.FAILED
        assert (await worker.settled()).counters["io_defects"] == 5
    assert sum("a defect" in record.message for record in caplog.records) == 1


async def test_a_defect_at_start_is_told() -> None:
    store = MemoryStore(errors={"check": [ZeroDivisionError("oops")]})
    async with served(lambda _: store, on_unavailable="serve") as (worker, serving):
        assert await worker.hear() == wire.Ready(False, "defect", "ZeroDivisionError('oops')")
        await serving


async def test_the_end_of_the_stream_ends_everything() -> None:
    store = GatedStore()
    async with rig.serving(store, max_inflight_requests=2) as (worker, serving):
        worker.say(rig.fetch(1), rig.fetch(2), rig.fetch(3))
        await worker.settled()
        worker.hang_up()
        await asyncio.wait_for(serving, 100)
        assert store.closed
        assert len(store.begun) == 2
        assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_drain_gives_up_fetches_and_finishes_uploads() -> None:
    store = GatedStore()
    async with rig.serving(store, max_inflight_requests=4) as (worker, _):
        for i in range(5):
            worker.fill(i, number=i)
        worker.say(*(rig.upload(i) for i in range(5)), *(rig.fetch(i) for i in range(5, 10)))
        await worker.settled()
        worker.say(wire.Drain(30.0), rig.upload(20))
        ends = await worker.done(6)
        assert set(ends) == {5, 6, 7, 8, 9, 20}
        assert {end.outcome for end in ends.values()} == {Outcome.CANCELLED}
        store.open_gate()
        ends = await worker.done(5)
        assert {end.outcome for end in ends.values()} == {Outcome.OK}
        assert await worker.hear() == wire.Drained(0)


@pytest.mark.parametrize("drain", [True, False])
async def test_uploads_are_tried_again_only_in_a_drain(drain: bool) -> None:
    """Otherwise the planner does, which is gone by then."""
    store = MemoryStore(errors={"put": [StoreUnavailable("away")] * 2})
    async with rig.serving(store, max_attempts=3) as (worker, _):
        worker.fill(1, number=1)
        worker.say(rig.upload(1), *([wire.Drain(30.0)] if drain else []))
        assert (await worker.done(1))[1].outcome is (Outcome.OK if drain else Outcome.FAILED)


async def test_a_drain_goes_on_when_the_worker_is_gone() -> None:
    store = GatedStore()
    async with rig.serving(store, max_inflight_requests=1) as (worker, serving):
        for i in range(3):
            worker.fill(i, number=i)
        worker.say(*(rig.upload(i) for i in range(3)), wire.Drain(30.0))
        worker.hang_up()
        store.open_gate()
        await asyncio.wait_for(serving, 100)
        assert [await store.head(rig.object_key(i)) is not None for i in range(3)] == [True] * 3
        assert store.closed
