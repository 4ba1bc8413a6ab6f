"""s3kv with one thing done wrong: what the simulation has to notice."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from lab.books import CHECKS
from s3kv.errors import StoreDenied, StoreError
from s3kv.host.table import EntryState, Table
from s3kv.io import process_life
from s3kv.io.client import IoClient
from s3kv.io.process_life import State
from s3kv.io.server.jobs import JobQueue
from s3kv.io.server.service import Service
from s3kv.io.sources import pacing
from s3kv.io.sources.bucket import BucketSource
from s3kv.io.sources.quarantine import Quarantine
from s3kv.io.sources.transfer_job import TransferJob
from s3kv.messages import BucketJob, JobEnd, JobKind, SaveJob, StepReport
from s3kv.objects.codec import ChunkFormat
from s3kv.objects.headers import read_header
from s3kv.objects.integrity import Integrity
from s3kv.objects.keys import Namespace
from s3kv.place import Place
from s3kv.planning.breaker import Breaker, BreakerState
from s3kv.planning.index import BucketIndex
from s3kv.planning.job import Job
from s3kv.planning.ledger import Ledger
from s3kv.planning.uploads import UploadRetries
from s3kv.types import ChunkKey, Outcome
from s3kv.worker.rank import RankWorker
from tests.mutants import Mutants, Patch
from tests.unit.planning import test_mutants as planning

MUTANTS = Mutants()
mutant, instead_of, swap = MUTANTS.mutant, MUTANTS.instead_of, MUTANTS.swap

check = ChunkFormat.check
digest = Integrity.digest
chunk = Namespace.chunk
fetch = BucketSource.fetch
upload = BucketSource.upload
send_end = Service._send_end
cancel = Service._cancel
bury = IoClient._bury
submit_to_any = IoClient.submit
end_of_job = JobQueue.end
saved = RankWorker._saved
take_report = RankWorker.take_report
asked = Ledger._asked


swap("believes_every_object", ChunkFormat, "check", lambda self, place, nbytes, block_hash: None)
swap(
    "leaves_the_rank_out_of_the_key",
    Namespace,
    "chunk",
    lambda self, key, shard, **how: chunk(self, key, "h0-0of1-l0-1of2", **how),
)
swap("sends_without_sealing", ChunkFormat, "seal", lambda self, buffer, block_hash: None)
swap("reads_again_what_was_bad", Quarantine, "bars", lambda self, key, now_s: False)
swap("never_replaces_a_dead_process", IoClient, "_restart", lambda self: None)
swap("never_notices_a_process_that_hangs", process_life, "_SILENCE_MAX_S", math.inf)
swap("ignores_fences", RankWorker, "_fence", lambda self, job_ids: None)
swap("counts_no_use_above", BucketIndex, "use", lambda self, key, now_s: None)


@instead_of(ChunkFormat, "check")
def checks_the_length_alone(self: ChunkFormat, place: Place, nbytes: int, block_hash: bytes) -> Any:
    return None if nbytes == self.object_bytes else "length"


@instead_of(ChunkFormat, "check")
def checks_the_digest_and_not_whose_object_it_is(
    self: ChunkFormat, place: Place, nbytes: int, block_hash: bytes
) -> Any:
    reason = check(self, place, nbytes, block_hash)
    if reason != "block_hash":
        return reason
    return check(self, place, nbytes, read_header(place.header, object_bytes=nbytes).block_hash)


@instead_of(Integrity, "digest")
def digests_half_a_payload(self: Integrity, header: bytes, number: int, segment: memoryview) -> str:
    return digest(self, header, number, segment[: len(segment) // 2])


@instead_of(Namespace, "chunk")
def leaves_the_model_out_of_the_key(self: Namespace, key: ChunkKey, shard: str) -> str:
    return chunk(Namespace(self.prefix, "0" * 32), key, shard)


def misses_after(error: type[StoreError]) -> Callable[..., Awaitable[JobEnd]]:
    async def hasty(self: BucketSource, job: TransferJob, **kind: bool) -> JobEnd:
        try:
            return await fetch(self, job, **kind)
        except error:
            return job.end(Outcome.MISSING)

    return hasty


swap("takes_403_for_404", BucketSource, "fetch", misses_after(StoreDenied))
swap("takes_every_error_for_404", BucketSource, "fetch", misses_after(StoreError))


@instead_of(BucketSource, "upload")
async def counts_a_failed_upload_as_done(self: BucketSource, job: TransferJob) -> JobEnd:
    try:
        return await upload(self, job)
    except StoreError:
        return job.end(Outcome.OK, nbytes=job.nbytes)


@instead_of(BucketSource, "attempts")
async def tries_for_ever(self: BucketSource, call: Callable[[], Awaitable[Any]], **_: float) -> Any:
    while True:
        try:
            return await call()
        except StoreError:
            await asyncio.sleep(0.5)


@instead_of(pacing, "hedged")
async def lets_a_second_request_go_on_and_write(
    request: Any, late: asyncio.Future[None], may_hedge: Callable[[], bool]
) -> Any:
    requests = {asyncio.ensure_future(request(lambda: True))}
    await asyncio.wait({*requests, late}, return_when=asyncio.FIRST_COMPLETED)
    if may_hedge():
        requests.add(asyncio.ensure_future(request(lambda: True)))
    ended, _ = await asyncio.wait(requests, return_when=asyncio.FIRST_COMPLETED)
    return ended.pop().result(), False


@mutant
def says_done_while_a_cancelled_fetch_still_writes(patch: Patch) -> None:
    def hasty(self: Service, job_id: int, *, if_waiting: bool = False) -> None:
        is_fetch = job_id in self._queue.ids(JobKind.FETCH) and not if_waiting
        if is_fetch and job_id in self._tasks and job_id not in self._cancelled:
            send_end(self, JobEnd(job_id, JobKind.FETCH, Outcome.CANCELLED))
            self._said = {*getattr(self, "_said", ()), job_id}  # type: ignore[attr-defined]
        cancel(self, job_id, if_waiting=if_waiting)

    def once(self: Service, end: JobEnd) -> None:
        if end.job_id not in getattr(self, "_said", ()):
            send_end(self, end)

    patch.setattr(Service, "_cancel", hasty)
    patch.setattr(Service, "_send_end", once)


@instead_of(Service, "_send_end")
def says_nothing_of_cancelled_jobs(self: Service, end: JobEnd) -> None:
    if end.outcome is not Outcome.CANCELLED:
        send_end(self, end)


@instead_of(Service, "_cancel")
def forgets_the_jobs_that_are_cancelled_while_they_wait(
    self: Service, job_id: int, *, if_waiting: bool = False
) -> None:
    if self._queue.withdraw(job_id) is None:
        cancel(self, job_id, if_waiting=if_waiting)


@instead_of(JobQueue, "end")
def starts_no_job_when_one_has_ended(self: JobQueue, job: TransferJob) -> None:
    end_of_job(self, job)
    self._places.take(job)


@instead_of(IoClient, "_bury")
def gives_slots_back_before_the_process_is_dead(self: IoClient) -> None:
    self._jobs.died("soon dead", crashed=False)
    bury(self)


@instead_of(IoClient, "_bury")
def forgets_the_jobs_of_a_dead_process(self: IoClient) -> None:
    if self._child is not None and self._child.is_dead():
        self._jobs._outstanding.clear()
    bury(self)


@instead_of(IoClient, "submit")
def loses_what_a_dead_process_was_sent(self: IoClient, job: BucketJob) -> None:
    if self.life.state is State.UP:
        submit_to_any(self, job)


@mutant
def uploads_before_it_has_copied(patch: Patch) -> None:
    def hasty(self: RankWorker, orders: Iterable[SaveJob]) -> None:
        for order in orders:
            self._saves[order.job_id] = self._announced.pop(order.job_id)
            copy = order.job_id, order.key.group, order.slot, order.block_ids
            self._copies.save(*copy, self._copies.mark())
            self._start(BucketJob(order.job_id, JobKind.UPLOAD, order.key, order.slot))

    def only_ended(self: RankWorker, order: SaveJob, ok: bool, seconds: float) -> None:
        self._end(JobEnd(order.job_id, JobKind.SAVE, Outcome.OK, 0, seconds))

    patch.setattr(RankWorker, "save", hasty)
    patch.setattr(RankWorker, "_saved", only_ended)


@instead_of(RankWorker, "_saved")
def ends_a_failed_save_once(self: RankWorker, order: SaveJob, ok: bool, seconds: float) -> None:
    if ok:
        saved(self, order, ok, seconds)
    else:
        self._end(JobEnd(order.job_id, JobKind.SAVE, Outcome.FAILED, 0, seconds))


@instead_of(RankWorker, "_saved")
def uploads_what_was_not_copied(self: RankWorker, order: SaveJob, ok: bool, seconds: float) -> None:
    saved(self, order, True, seconds)


@instead_of(RankWorker, "take_report")
def loses_reports(self: RankWorker) -> StepReport | None:
    report = take_report(self)
    return report if report is None or len(report.ends) < 4 else None


@instead_of(RankWorker, "take_loaded")
def never_tells_that_a_load_failed(self: RankWorker) -> tuple[set[str], set[str]]:
    loaded, self._loaded = self._loaded, set()
    self._failed.clear()
    return loaded, set()


@mutant
def evicts_what_is_leased(patch: Patch) -> None:
    def ruthless(self: Table, units: int) -> list[ChunkKey]:
        number = next((n for n in self._lru if self._at[n].state is EntryState.CLEAN), None)
        if number is None:
            return []
        entry = self._at[number]
        del self._lru[number]
        self._release(entry, EntryState.FREE)
        return [entry.key]

    patch.setattr(Table, "_evict", ruthless)
    patch.setitem(CHECKS, Table, lambda of: None)


@mutant
def evicts_before_the_upload_has_ended(patch: Patch) -> None:
    def early(self: Ledger, job: Any) -> None:
        copied(self, job)
        if job.outcomes[JobKind.SAVE].is_success:
            self.table.mark_clean(job.entry)

    copied = Ledger._copied
    patch.setattr(Ledger, "_copied", early)
    patch.setattr(Table, "mark_clean", planning.mark_clean_once)


@mutant
def never_tries_an_upload_again(patch: Patch) -> None:
    patch.setattr(UploadRetries, "failed", lambda self, entry, attempt, now_s: True)
    patch.setitem(CHECKS, Ledger, lambda of: None)


@mutant
def has_a_breaker_that_never_closes(patch: Patch) -> None:
    patch.setattr(Breaker, "allows", lambda self, now_s: self.state is BreakerState.CLOSED)
    patch.setattr(Breaker, "succeeded", lambda self: None)


@instead_of(Ledger, "_asked")
def believes_for_ever_what_the_bucket_once_had(self: Ledger, job: Job, now_s: float) -> None:
    job.outcomes[JobKind.USE] = Outcome.EXISTS
    asked(self, job, now_s)


MUTANTS += planning.MUTANTS + planning.FLEETS
"""Of the planner's own tests: here they have to show in the whole."""
