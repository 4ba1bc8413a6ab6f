"""A tier with one thing done wrong: what a fleet of tiers has to notice."""

from __future__ import annotations

from s3kv.connectors import offload_tier
from s3kv.io.client import IoClient
from s3kv.io.sources.reception import Reception
from s3kv.messages import JobEnd
from s3kv.objects.headers import Mismatch
from s3kv.planning.offload import OffloadPlanner
from s3kv.planning.row_transfers import RowJob, RowKey, RowTransfer, RowTransfers, TransferEnd
from tests.mutants import Mutants

MUTANTS = Mutants()
instead_of, swap = MUTANTS.instead_of, MUTANTS.swap

take_ends = RowTransfers.take_ends
take_cancels = RowTransfers.take_cancels
end_if_done = RowTransfers.end_if_done
job_ended = RowTransfers.job_ended
fetched = OffloadPlanner._fetched
learn = OffloadPlanner._learn
check = Reception.check

swap(
    "answers_retry_for_ever", OffloadPlanner, "_decide", lambda self, request, retries, now_s: None
)
swap(
    "holds_the_rows_of_requests_that_have_ended",
    OffloadPlanner,
    "_release",
    lambda self, request: request.promised.clear(),
)
swap("does_not_wait_for_the_rows_at_a_reset", IoClient, "settle", lambda self, timeout_s: None)
swap("resets_without_a_new_salt", offload_tier, "salted", lambda block_hash, salt: block_hash)


@instead_of(RowTransfers, "take_ends")
def reports_a_transfer_twice(self: RowTransfers) -> list[TransferEnd]:
    ends = take_ends(self)
    return ends + ends[:1]


@instead_of(RowTransfers, "end_if_done")
def reports_a_transfer_whose_jobs_still_write(
    self: RowTransfers, transfer: RowTransfer, now_s: float
) -> None:
    left, transfer.jobs_left = transfer.jobs_left, 0
    if transfer.transfer_id in self._transfers:
        end_if_done(self, transfer, now_s)
    transfer.jobs_left = left


@instead_of(RowTransfers, "job_ended")
def reports_failed_fetches_as_moved(self: RowTransfers, end: JobEnd) -> RowJob:
    job = job_ended(self, end)
    job.transfer.succeeded.append(job.key.name)
    return job


@instead_of(RowTransfers, "take_cancels")
def closes_a_request_and_cancels_nothing(self: RowTransfers) -> list[int]:
    take_cancels(self)
    return []


@instead_of(OffloadPlanner, "_fetched")
def hits_again_what_failed(self: OffloadPlanner, job: RowJob, end: JobEnd, now_s: float) -> None:
    fetched(self, job, end, now_s)
    request = self._requests.get(job.transfer.request_id)
    if request is not None:
        request.lost.clear()
        request.is_closed = False
        self._slow.clear()
    self.index._absent_young.clear()
    self.index._absent_old.clear()


@instead_of(OffloadPlanner, "_learn")
def announces_no_removal(self: OffloadPlanner, key: RowKey, end: JobEnd, now_s: float) -> None:
    learn(self, key, end, now_s)
    self.changes = [change for change in self.changes if change[1]]


@instead_of(Reception, "check")
async def believes_a_short_object(self: Reception, nbytes: int) -> Mismatch | None:
    reason = await check(self, nbytes)
    return None if nbytes < self._job.nbytes else reason
