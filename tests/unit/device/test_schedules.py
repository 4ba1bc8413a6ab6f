"""Engines on simulated GPUs: no byte is ever wrong, and every way to get it wrong is noticed."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest

from s3kv.device.copies import BlockCopies
from s3kv.device.gpu.copy_streams import EventTicket, Staging
from s3kv.device.gpu.gpu_copier import GpuCopier
from s3kv.device.gpu.interface import Event
from s3kv.messages import CopyPart
from tests.mutants import Mutant, Mutants, Patch
from tests.unit.device.schedule import Schedule
from tests.unit.device.simulated import SimulatedEvent, SimulatedStream

WAITS = {
    ("save pages", "engine"),  # the mark
    ("save bus", "save pages"),  # what is gathered
    ("save pages", "save bus"),  # a staging buffer that is free again
    ("load pages", "engine"),
    ("load bus", "engine"),  # memory that was the engine's before it became staging
    ("load pages", "load bus"),  # what has arrived
    ("load bus", "load pages"),
    ("engine", "save pages"),  # a fence
}
"""Which stream waits for events of which, but for the engine's own."""

NOTICED_WITHIN = 150

MUTANTS = Mutants()
mutant, instead_of, swap = MUTANTS.mutant, MUTANTS.instead_of, MUTANTS.swap

init_staging, init_ticket = Staging.__init__, EventTicket.__init__
scatter = SimulatedStream.scatter

swap("says_done_when_it_was_launched", SimulatedEvent, "query", lambda self: True)
swap(
    "tells_a_failure_while_what_was_launched_still_runs", BlockCopies, "_settle", lambda self: None
)


@pytest.mark.parametrize("first", range(0, 400, 100))
def test_no_byte_is_wrong(first: int) -> None:
    waits = set()
    for seed in range(first, first + 100):
        waits |= run(seed)
    assert waits - {("engine", "engine")} == WAITS


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_no_byte_is_wrong_whatever_happens() -> None:
    first = int(os.environ.get("S3KV_SEED", random.SystemRandom().randrange(2**32)))
    print(f"S3KV_SEED={first}")
    for seed in range(first, first + 2_000):
        run(seed)


def run(seed: int) -> set[tuple[str, str]]:
    schedule = Schedule(seed)
    try:
        schedule.run()
    except Exception:
        print(f"python -m tests.unit.device.schedule {seed}")
        raise
    return schedule.gpu.waits


@pytest.mark.parametrize("deaf", sorted(WAITS), ids="-".join)
def test_no_wait_can_be_left_out(deaf: tuple[str, str]) -> None:
    assert is_noticed(deaf)


def is_noticed(deaf: tuple[str, str] | None = None) -> bool:
    for seed in range(NOTICED_WITHIN):
        try:
            Schedule(seed, deaf).run()
        except AssertionError:
            return True
    return False


@instead_of(BlockCopies, "fence")
def lets_fences_pass_what_was_not_launched(self: BlockCopies, job_ids: set[int]) -> None:
    for job in [self._out.jobs[i] for i in job_ids if i in self._out.jobs]:
        job.ticket.fence()


@instead_of(GpuCopier, "mark")
def marks_a_stream_that_is_not_the_current_one(self: GpuCopier) -> Event:
    event = self._gpu.new_event()
    self._gpu.streams[0].record(event)  # type: ignore[attr-defined]
    return event


@instead_of(EventTicket, "__init__")
def uses_an_event_again_while_it_is_asked(
    self: EventTicket, gpu: Any, events: list[Event], *rest: Any
) -> None:
    init_ticket(self, gpu, events, *rest)
    events.append(self.finished)


@instead_of(Staging, "__init__")
def has_a_single_turn_for_all_buffers(self: Staging, *arguments: Any) -> None:
    """The buffers' events stay where they are, and the memory is always the first one's."""
    init_staging(self, *arguments)
    buffers = [next(self.buffers) for _ in range(2)]
    buffers[1].memory, buffers[1].stacks = buffers[0].memory, buffers[0].stacks


@instead_of(Staging, "__init__")
def writes_row_numbers_over_those_not_read(self: Staging, gpu: Any, *arguments: Any) -> None:
    init_staging(self, gpu, *arguments)
    places = self.places
    self.places = ((*place, gpu.new_event()) for *place, _ in places)  # type: ignore[assignment]


@mutant
def ends_a_load_with_its_first_part(patch: Patch) -> None:
    copy_in = GpuCopier.copy_in
    firsts: dict[int, EventTicket] = {}

    def first(self: GpuCopier, part: CopyPart, mark: Event) -> EventTicket:
        return firsts.setdefault(id(mark), copy_in(self, part, mark))

    patch.setattr(GpuCopier, "copy_in", first)


@mutant
def fences_what_was_read_with_what_was_read_before(patch: Patch) -> None:
    """Records the end of the gather before the gather."""
    record, gather = SimulatedStream.record, SimulatedStream.gather

    def late(self: SimulatedStream, stacks: Any, block_ids: Any) -> None:
        self.__dict__["later"] = lambda: gather(self, stacks, block_ids)

    def early(self: SimulatedStream, event: SimulatedEvent) -> None:
        record(self, event)
        if later := self.__dict__.pop("later", None):
            later()

    patch.setattr(SimulatedStream, "gather", late)
    patch.setattr(SimulatedStream, "record", early)


@instead_of(SimulatedStream, "scatter")
def forgets_the_first_block_of_a_part(
    self: SimulatedStream, stacks: Any, rows: Any, first_block: int
) -> None:
    scatter(self, stacks, rows, 0)


@pytest.mark.parametrize("broken", MUTANTS, ids=lambda broken: broken.__name__)
def test_every_mutant_is_noticed(monkeypatch: pytest.MonkeyPatch, broken: Mutant) -> None:
    broken(monkeypatch)
    assert is_noticed()
