"""Transfers with one rule taken out: the model of vLLM's manager has to notice each of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from s3kv.messages import JobEnd
from s3kv.planning.offload import OffloadPlanner
from s3kv.planning.row_transfers import RowJob, RowTransfer, RowTransfers, TransferEnd
from tests.unit.planning.tiering import is_noticed


class TwiceReported(RowTransfers):
    def take_ends(self) -> list[TransferEnd]:
        ends = super().take_ends()
        return ends + ends[:1]


class EarlyReported(RowTransfers):
    def end_if_done(self, transfer: RowTransfer, now_s: float) -> None:
        left, transfer.jobs_left = transfer.jobs_left, 0
        if transfer.transfer_id in self._transfers:
            super().end_if_done(transfer, now_s)
        transfer.jobs_left = left


class AllSucceeded(RowTransfers):
    def job_ended(self, end: JobEnd) -> RowJob:
        job = super().job_ended(end)
        job.transfer.succeeded.append(job.key.name)
        return job


class NeverAbandoned(RowTransfers):
    def cancel_loads(self, began_before_s: float, but_of: Iterable[str] = ()) -> None:
        pass


class NotCancelled(RowTransfers):
    def take_cancels(self) -> list[int]:
        super().take_cancels()
        return []


def with_transfers(transfers: type[RowTransfers]) -> type[OffloadPlanner]:
    class Mutant(OffloadPlanner):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            self.transfers = transfers()

    return Mutant


MUTANTS = {
    "reports a transfer twice": with_transfers(TwiceReported),
    "reports a transfer while its jobs still write": with_transfers(EarlyReported),
    "reports keys as moved whose fetch has failed": with_transfers(AllSucceeded),
    "leaves the fetches of requests that have ended": with_transfers(NeverAbandoned),
    "closes a request and cancels nothing": with_transfers(NotCancelled),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_transfers_without_one_of_their_rules_are_noticed(mutant: str) -> None:
    assert is_noticed(MUTANTS[mutant]), f"nothing notices a tier that {mutant}"
