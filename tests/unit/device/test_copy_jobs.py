"""The window of launched copies: what is urgent overtakes what is queued, and nothing starves."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from s3kv.device.copies import BlockCopies
from s3kv.device.copy_jobs import LaunchWindow
from s3kv.messages import CopyPart
from tests.unit.device.schedule import stepped

CHUNK_BYTES = 32 * 2**20
"""256 tokens of an 8B model."""


@dataclass
class HeldTicket:
    name: str
    nbytes: int = CHUNK_BYTES
    seconds: float = 0.0
    running: bool = False
    over: bool = False
    lost: bool = False

    def begun(self) -> bool:
        return self.running

    def done(self) -> bool:
        if self.lost:
            raise RuntimeError("CUDA error: unspecified launch failure")
        return self.over

    def fence(self) -> None:
        """There is no stream to hold."""


@dataclass
class HeldCopier:
    """A device whose copies end when a test says so. `launched` has all of them, in order."""

    launched: list[HeldTicket] = field(default_factory=list)
    pinned = True

    def mark(self) -> None:
        return

    def enter_thread(self) -> None:
        """The test's thread is the copy thread."""

    def copy_out(self, part: CopyPart, mark: None) -> HeldTicket:
        self.launched.append(HeldTicket(f"save {part.slot}"))
        return self.launched[-1]

    def copy_in(self, part: CopyPart, mark: None) -> HeldTicket:
        self.launched.append(HeldTicket(f"load {part.slot}"))
        return self.launched[-1]

    def settle(self) -> None:
        """Nothing moves."""

    def close(self) -> None:
        """Nothing is held."""

    def names(self) -> list[str]:
        return [ticket.name for ticket in self.launched]


def launch_all(copies: BlockCopies) -> None:
    while copies._start_next():
        pass


def save_all(copies: BlockCopies) -> None:
    for job in range(256):
        copies.save(job, 0, job, [0])
    launch_all(copies)


def load(copies: BlockCopies, name: str, count: int = 1) -> None:
    copies.load(name, [CopyPart(0, slot, 0, (1,)) for slot in range(count)])


@pytest.fixture
def held() -> HeldCopier:
    return HeldCopier()


@pytest.fixture
def copies(held: HeldCopier) -> BlockCopies:
    return stepped(held)


def test_a_backlog_of_saves_is_not_launched_at_once(held: HeldCopier, copies: BlockCopies) -> None:
    save_all(copies)
    assert held.names() == ["save 0", "save 1"]
    held.launched[0].over = True
    launch_all(copies)
    assert held.names() == ["save 0", "save 1", "save 2"]


def test_the_newest_of_many_saves_is_read_within_the_window(
    held: HeldCopier, copies: BlockCopies
) -> None:
    """The host waits for no copy: none of them ends."""
    save_all(copies)
    copies.fence([255])
    assert held.names() == ["save 0", "save 1", "save 255"]
    launch_all(copies)
    assert len(held.launched) == 3, "the fenced save made room for others"


def test_a_load_overtakes_a_backlog_of_saves(held: HeldCopier, copies: BlockCopies) -> None:
    save_all(copies)
    load(copies, "r")
    launch_all(copies)
    assert held.names() == ["save 0", "save 1", "load 0"]


def test_a_backlog_of_loads_is_not_launched_at_once_and_lets_saves_by(
    held: HeldCopier, copies: BlockCopies
) -> None:
    load(copies, "r", 100)
    copies.save(7, 0, 7, [0])
    launch_all(copies)
    assert held.names() == ["load 0", "load 1", "save 7"]


def test_saves_take_turns_with_loads_that_never_fill_the_window(
    held: HeldCopier, copies: BlockCopies
) -> None:
    copies.save(7, 0, 7, [0])
    load(copies, "r", 30)
    while copies._start_next():
        held.launched[-1].over = True
    assert held.names().index("save 7") == 8
    assert len(held.launched) == 31


def test_who_waits_for_all_to_be_launched_waits_for_no_room(
    held: HeldCopier, copies: BlockCopies
) -> None:
    for job in range(5):
        copies.save(job, 0, job, [0])
    load(copies, "r", 5)
    assert copies.wait_started(0.0)
    assert len(held.launched) == 10
    assert copies.poll() == ([], [])


def test_a_load_of_many_parts_ends_with_the_last(held: HeldCopier, copies: BlockCopies) -> None:
    load(copies, "r", 3)
    launch_all(copies)
    for number in range(3):
        assert copies.poll().loaded == []
        held.launched[number].over = True
        launch_all(copies)
    assert copies.poll().loaded == [("r", True)]


def fill(window: LaunchWindow, nbytes: int) -> list[HeldTicket]:
    """Launch copies until there is no room."""
    launched: list[HeldTicket] = []
    while window.has_room():
        launched.append(HeldTicket("", nbytes))
        window.add(launched[-1])
    return launched


def finish(window: LaunchWindow, tickets: list[HeldTicket], bytes_per_s: float) -> None:
    for ticket in tickets:
        ticket.seconds, ticket.over = ticket.nbytes / bytes_per_s, True
    window.has_room()


def test_a_window_is_64_mib_until_copies_have_been_measured() -> None:
    sizes = (1 << 20, 10 << 20, 32 << 20, 100 << 20)
    assert [len(fill(LaunchWindow(float), size)) for size in sizes] == [64, 7, 2, 1]


@pytest.mark.parametrize(("bytes_per_s", "count"), [(55e9, 63), (12e9, 14), (6e9, 7), (1e8, 1)])
def test_a_window_takes_as_long_as_such_copies_show(bytes_per_s: float, count: int) -> None:
    window = LaunchWindow(float)
    finish(window, fill(window, 2**20 + 5000), bytes_per_s)
    again = fill(window, 2**20)
    assert len(again) == count
    finish(window, again, bytes_per_s)
    # What long copies take says nothing of short ones.
    assert len(fill(window, 2**19)) == 128


def test_a_window_follows_a_bus_that_others_slow_down_and_no_single_copy() -> None:
    window = LaunchWindow(float)
    finish(window, fill(window, 2**20), 12e9)
    late = fill(window, 2**20)
    late[0].seconds, late[0].over = 1.0, True
    window.has_room()
    finish(window, late[1:], 12e9)
    few = fill(window, 2**20)
    assert 12 <= len(few) <= 14
    for _ in range(20):
        finish(window, few, 3e9)
        few = fill(window, 2**20)
    assert len(few) == 4


def test_the_next_long_copy_is_launched_just_before_the_one_that_runs_ends() -> None:
    """So the bus is never idle, and what is launched behind it waits for little more than one."""
    now_s = 0.0
    window = LaunchWindow(lambda: now_s)
    finish(window, fill(window, 32 << 20), 6e9)
    (running,) = fill(window, 32 << 20)
    now_s = 1.0  # it waits for the engine
    assert not window.has_room()
    running.running = True
    assert not window.has_room()
    now_s = 1.0043  # of 5.6 ms
    assert not window.has_room()
    now_s = 1.0045
    assert window.has_room()
    window.add(HeldTicket("", 32 << 20))
    now_s = 9.0  # a bus that stands still
    assert not window.has_room()


def test_a_device_that_fails_leaves_room() -> None:
    window = LaunchWindow(float)
    tickets = [HeldTicket("") for _ in range(2)]
    for ticket in tickets:
        window.add(ticket)
    assert not window.has_room()
    tickets[0].lost = True
    assert window.has_room()


def test_what_has_ended_at_once_takes_no_room() -> None:
    window = LaunchWindow(float)
    for _ in range(100):
        window.add(HeldTicket("", nbytes=0))
    assert window.has_room()
    assert not window._launched
