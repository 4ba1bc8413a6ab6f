"""Sources are asked in order, until one has the object or says that it is not merely absent. A
chunk that is computed while it is fetched is uploaded only if the fetch does not find it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
from msgspec.structs import replace

from lab.memory_store import MemoryStore
from s3kv.errors import StoreDenied, StoreRefused, StoreUnavailable
from s3kv.io import wire
from s3kv.io.sources import chain
from s3kv.io.sources.chain import Chain
from s3kv.io.sources.transfer_job import TransferJob
from s3kv.messages import JobEnd, JobKind
from s3kv.place import Place
from s3kv.types import Outcome
from tests.unit.io import rig
from tests.unit.io.rig import Worker

JOB = TransferJob(7, JobKind.FETCH, "key", b"hash", rig.FORMAT, Place.of(b""))
ABSENT, HIT = JOB.end(Outcome.MISSING), JOB.end(Outcome.OK)


@dataclass
class Answering:
    """A source with one answer."""

    name: str
    answer: JobEnd | Exception | None
    is_near: bool = False
    asked: list[TransferJob] = field(default_factory=list)

    async def fetch(self, job: TransferJob) -> JobEnd | None:
        self.asked.append(job)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    ("answers", "decides", "outcome"),
    [
        ([HIT, HIT], "0", Outcome.OK),
        ([ABSENT, HIT], "1", Outcome.OK),
        ([None, ABSENT, HIT, ABSENT], "2", Outcome.OK),
        ([ABSENT, ABSENT], "1", Outcome.MISSING),
        ([ABSENT, None], "0", Outcome.MISSING),
        ([None], "", Outcome.MISSING),
        ([JOB.end(Outcome.CORRUPT, reason="digest"), HIT], "0", Outcome.CORRUPT),
        ([JOB.end(Outcome.MISSING, reason="quarantined"), HIT], "0", Outcome.MISSING),
        ([ABSENT, StoreUnavailable("down"), HIT], "1", Outcome.FAILED),
        ([StoreDenied("no"), HIT], "0", Outcome.DENIED),
        ([StoreRefused("too large"), HIT], "0", Outcome.INVALID),
    ],
)
async def test_the_first_that_has_it_bad_or_good_or_fails_decides(
    answers: list[JobEnd | Exception | None], decides: str, outcome: Outcome
) -> None:
    sources = [Answering(str(number), answer) for number, answer in enumerate(answers)]
    end = await Chain(sources, bucket=None).run(JOB)  # type: ignore[arg-type]
    assert (end.job_id, end.outcome, end.source) == (7, outcome, decides)
    if isinstance(error := answers[int(decides or 0)], Exception):
        assert end.detail == str(error)
    asked = [bool(source.asked) for source in sources]
    assert asked == sorted(asked, reverse=True), "in order"
    assert all(asked) == (decides == str(len(answers) - 1) or answers[-1] is None)


@pytest.mark.parametrize(
    ("near", "disk", "bucket", "ends"),
    [
        (True, ABSENT, HIT, (Outcome.MISSING, "disk", True)),
        (False, ABSENT, HIT, (Outcome.OK, "bucket", False)),
        (True, HIT, HIT, (Outcome.OK, "disk", True)),
        (False, HIT, HIT, (Outcome.OK, "disk", True)),
        (True, None, ABSENT, (Outcome.MISSING, "", True)),
        (False, None, ABSENT, (Outcome.MISSING, "bucket", False)),
    ],
)
async def test_a_near_fetch_asks_only_sources_of_this_host(
    near: bool, disk: JobEnd | None, bucket: JobEnd, ends: tuple[Outcome, str, bool]
) -> None:
    sources = [
        Answering("disk", disk and replace(disk), is_near=True),
        Answering("bucket", replace(bucket)),
    ]
    end = await Chain(sources, bucket=None).run(dataclasses.replace(JOB, near=near))  # type: ignore[arg-type]
    assert (end.outcome, end.source, end.near) == ends
    assert bool(sources[1].asked) is not end.near
    assert end.source or not near or end.detail


async def test_what_this_host_has_is_uploaded_all_the_same() -> None:
    class Uploading(Answering):
        upload = Answering.fetch

    bucket = Uploading("bucket", replace(HIT))
    disk = Answering("disk", replace(HIT), is_near=True)
    chain = Chain([disk, bucket], bucket)  # type: ignore[arg-type, list-item]
    assert (await asyncio.create_task(chain.run(JOB))).source == "disk"
    await chain.run(dataclasses.replace(JOB, kind=JobKind.UPLOAD))
    assert len(bucket.asked) == 1, "it may have lost the object"


KEY = rig.object_key(1)
FETCH, UPLOAD = rig.fetch(3, number=1), rig.upload(1)


class Bucket(MemoryStore):
    """Answers reads once `answers` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = asyncio.Event()

    async def begin(self, verb: str, key: str) -> None:
        await super().begin(verb, key)
        if verb == "get_into":
            await self.answers.wait()


@pytest.fixture
async def worker(bucket: Bucket) -> AsyncIterator[Worker]:
    async with rig.serving(bucket) as (worker, _):
        worker.fill(1, number=1)
        yield worker


@pytest.mark.parametrize("holds", [True, False])
async def test_an_upload_waits_for_the_fetch_of_its_object(
    worker: Worker, bucket: Bucket, *, holds: bool
) -> None:
    if holds:
        rig.hold(bucket, 1)
    worker.say(FETCH, UPLOAD)
    await worker.settled()
    assert (bucket.asked["get_into"], bucket.asked["put"]) == (1, 0)
    bucket.answers.set()
    ends = await worker.done(2)
    found = (Outcome.OK, Outcome.EXISTS) if holds else (Outcome.MISSING, Outcome.OK)
    assert (ends[3].outcome, ends[1].outcome) == found
    assert bucket.asked["put"] == int(not holds)


async def test_without_a_source_on_this_host_a_near_fetch_finds_nothing(
    worker: Worker, bucket: Bucket
) -> None:
    rig.hold(bucket, 1)
    end = await worker.end_of(replace(FETCH, near=True))
    assert (end.outcome, end.near, bucket.asked["get_into"]) == (Outcome.MISSING, True, 0)
    assert end.detail


async def test_an_upload_does_not_wait_for_a_fetch_that_is_given_up(
    worker: Worker, bucket: Bucket
) -> None:
    worker.say(FETCH, UPLOAD)
    await worker.settled()
    worker.say(wire.Cancel(3))
    ends = await worker.done(2)
    assert (ends[3].outcome, ends[1].outcome) == (Outcome.CANCELLED, Outcome.OK)


async def test_what_a_fetch_has_just_found_is_not_sent_once(worker: Worker, bucket: Bucket) -> None:
    rig.hold(bucket, 1)
    bucket.answers.set()
    assert (await worker.end_of(FETCH)).outcome is Outcome.OK
    for puts in range(2):
        assert (await worker.end_of(UPLOAD)).outcome is Outcome.EXISTS
        assert bucket.asked["put"] == puts, "the second one asks the bucket"


async def test_what_was_found_long_ago_may_be_gone(
    worker: Worker, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chain, "_FOUND_S", 0.0)
    rig.hold(bucket, 1)
    bucket.answers.set()
    await worker.end_of(FETCH)
    await bucket.delete(KEY)
    assert (await worker.end_of(UPLOAD)).outcome is Outcome.OK


async def test_few_finds_are_remembered(
    worker: Worker, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chain, "_FOUND_KEYS", 1)
    bucket.answers.set()
    for number in (1, 2):
        rig.hold(bucket, number)
        await worker.end_of(rig.fetch(3, number=number))
    assert (await worker.end_of(UPLOAD)).outcome is Outcome.EXISTS
    assert bucket.asked["put"] == 1
