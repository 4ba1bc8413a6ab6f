"""Transfers by example. Those of whole engines, and of mutants, are in `tests.system.sim`."""

from __future__ import annotations

from s3kv.messages import JobEnd, JobKind
from s3kv.planning.row_transfers import RowKey, RowTransfers, TransferEnd
from s3kv.types import ChunkKey, Outcome

KEYS = [RowKey(bytes([n]), ChunkKey(0, bytes([n]))) for n in range(3)]


def test_a_transfer_is_reported_once_after_the_last_of_its_jobs() -> None:
    transfers = RowTransfers()
    transfer = transfers.begin(7, "a", 1.0, is_load=True)
    jobs = [transfers.add(transfer, key, row) for row, key in enumerate(KEYS)]
    assert (transfers.fetches, transfers.uploads) == (3, 0)
    for job, outcome in zip(jobs, (Outcome.OK, Outcome.MISSING, Outcome.OK), strict=True):
        transfers.end_if_done(transfer, 2.0)
        assert transfers.take_ends() == []
        assert (
            transfers.job_ended(JobEnd(job.job_id, JobKind.FETCH, outcome, 5)).key.chunk == job.key
        )
    transfers.end_if_done(transfer, 3.0)
    assert transfers.take_ends() == [TransferEnd(7, False, (KEYS[0].name, KEYS[2].name), 2.0, 10)]
    assert (transfers.take_ends(), transfers.fetches, transfers.jobs) == ([], 0, {})


def test_only_old_loads_of_requests_that_have_ended_are_cancelled() -> None:
    transfers = RowTransfers()
    begun = [("a", 1.0, True), ("b", 1.0, True), ("b", 5.0, True), ("b", 1.0, False)]
    ids = []
    for number, (request, began_s, is_load) in enumerate(begun):
        transfer = transfers.begin(number, request, began_s, is_load=is_load)
        ids.append(transfers.add(transfer, KEYS[0], number).job_id)
    transfers.cancel_loads(4.0, but_of=["a"])
    assert transfers.take_cancels() == [ids[1]]
    assert transfers.take_cancels() == []
