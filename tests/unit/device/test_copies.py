"""What comes before what: fences, loads before saves, ends told once, failures contained."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from s3kv.device import copies as copies_module
from s3kv.device.copier import Copier, Ticket
from s3kv.device.copies import BlockCopies, open_copier
from s3kv.device.cpu import CpuCopier
from s3kv.messages import CopyPart
from tests.unit.device.caches import Caches, Shape, build, places
from tests.unit.device.devices import Device
from tests.unit.device.test_copy_jobs import HeldTicket

LONG_S = 100.0


@dataclass
class GatedCopier:
    """A copier whose copies wait for `gate` on the copy thread, and that keeps a record.
    broken_slots: copies to or from these fail, after the gate."""

    copier: Copier
    gate: threading.Event = field(default_factory=threading.Event)
    entered: threading.Event = field(default_factory=threading.Event)
    """A copy has come to the gate."""
    broken_slots: set[int] = field(default_factory=set)
    bug_slots: set[int] = field(default_factory=set)
    log: list[tuple[str, int]] = field(default_factory=list)

    pinned = False

    def mark(self) -> Any:
        return self.copier.mark()

    def enter_thread(self) -> None:
        self.copier.enter_thread()

    def copy_out(self, part: CopyPart, mark: Any) -> Ticket:
        self._pass("save", part)
        return self.copier.copy_out(part, mark)

    def copy_in(self, part: CopyPart, mark: Any) -> Ticket:
        self._pass("load", part)
        return self.copier.copy_in(part, mark)

    def settle(self) -> None:
        self.copier.settle()
        self.log.append(("settle", -1))

    def close(self) -> None:
        self.copier.close()

    def _pass(self, kind: str, part: CopyPart) -> None:
        self.entered.set()
        assert self.gate.wait(LONG_S)
        self.log.append((kind, part.slot))
        if part.slot in self.broken_slots:
            raise RuntimeError("broken slot")
        if part.slot in self.bug_slots:
            raise AttributeError("a bug")


@dataclass
class Rig:
    device: Device
    caches: Caches
    copier: GatedCopier
    copies: BlockCopies
    slab: memoryview
    slot_bytes: int
    header_bytes: int

    def payload(self, slot: int) -> bytes:
        begin = slot * self.slot_bytes + self.header_bytes
        return bytes(self.slab[begin : begin + self.caches.layout().payload_bytes])

    def fill(self, value: int) -> None:
        """Launch, as the engine would, writes to every block."""
        self.device.launch(lambda: [buffer.fill_(value) for buffer in self.caches.buffers])


@contextmanager
def rig(device: Device) -> Iterator[Rig]:
    caches = build(Shape("LBNHC"), device.memory)
    where, form = places(caches)
    slab = memoryview(where.slab)
    copier = GatedCopier(device.open(where))
    copies = BlockCopies(copier)
    yield Rig(device, caches, copier, copies, slab, where.slot_bytes, form.header_bytes)
    copier.gate.set()
    copies.close()


def told(rig: Rig) -> tuple[list[Any], list[Any]]:
    """The ends of saves and loads, without what they took."""
    saved, loaded = rig.copies.poll()
    return [end[:2] for end in saved], loaded


def test_a_fence_keeps_the_engine_from_overwriting_what_is_being_saved(
    device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    with rig(device) as r:
        r.fill(1)
        r.copies.save(7, 0, 0, [0, 1])
        threading.Timer(0.05, r.copier.gate.set).start()
        r.copies.fence([7, 99])
        assert r.copier.gate.is_set(), "the fence did not wait for the save"
        r.fill(2)
        assert r.copies.wait_all(LONG_S)
        assert r.payload(0) == b"\1" * r.caches.layout().payload_bytes
        assert not caplog.records, "it was a moment"


def test_fences_of_unknown_and_ended_saves_are_fine(device: Device) -> None:
    with rig(device) as r:
        r.copier.gate.set()
        r.copies.save(7, 0, 0, [0, 1])
        assert r.copies.wait_all(LONG_S)
        r.copies.fence([7])
        r.copies.poll()
        r.copies.fence([7, 8])


def test_each_end_is_told_once(device: Device) -> None:
    with rig(device) as r:
        r.copies.save(7, 0, 0, [0, 1])
        r.copies.load("empty", [])
        assert r.copies.poll() == ([], [("empty", True)])
        r.copies.load("r", [CopyPart(0, 1, 0, (2, 3))])
        assert r.copies.poll() == ([], []), "a copy ended before it was made"
        assert not r.copies.wait_all(0.0)
        r.copier.gate.set()
        assert r.copies.wait_all(LONG_S)
        assert told(r) == ([(7, True)], [("r", True)])
        assert r.copies.poll() == ([], [])
        # Ids may come again.
        r.copies.save(7, 0, 0, [0, 1])
        r.copies.load("r", [CopyPart(0, 1, 0, (2, 3))])
        assert r.copies.wait_all(LONG_S)
        assert [len(ends) for ends in r.copies.poll()] == [1, 1]


def test_a_load_can_be_waited_for(device: Device) -> None:
    with rig(device) as r:
        r.copies.wait_load(LONG_S)  # there is none
        r.copies.load("r", [CopyPart(0, 1, 0, (2, 3))])
        r.copies.wait_load(0.0)
        assert r.copies.poll().loaded == [], "a load ended before it was made"
        threading.Timer(0.05, r.copier.gate.set).start()
        r.copies.wait_load(LONG_S)
        assert r.copies.poll().loaded == [("r", True)]


def test_an_id_on_its_way_is_refused() -> None:
    with rig(Device("cpu")) as r:
        r.copies.save(7, 0, 0, [0, 1])
        r.copies.load("r", [CopyPart(0, 1, 0, (2, 3))])
        with pytest.raises(ValueError, match="copy 7"):
            r.copies.save(7, 0, 1, [0, 1])
        with pytest.raises(ValueError, match="copy r"):
            r.copies.load("r", [])


def test_a_failed_copy_ends_and_the_others_go_on(device: Device) -> None:
    with rig(device) as r:
        r.copier.broken_slots = {1}
        broken, fine = CopyPart(0, 1, 0, (2, 3)), CopyPart(0, 2, 0, (4, 5))
        r.copies.save(1, 0, 1, [0, 1])
        r.copies.save(2, 0, 0, [0, 1])
        r.copies.load("half", [fine, broken, fine])
        r.copies.load("fine", [fine])
        r.copier.gate.set()
        assert r.copies.wait_all(LONG_S)
        saved, loaded = told(r)
        assert (sorted(saved), sorted(loaded)) == (
            [(1, False), (2, True)],
            [("fine", True), ("half", False)],
        )
        # After the failure the rest of the load is left out, but what ran before has settled.
        at = r.copier.log.index(("load", 1))
        assert r.copier.log[at : at + 3] == [("load", 1), ("settle", -1), ("load", 2)]


def test_what_does_not_fit_fails_and_touches_nothing(device: Device) -> None:
    with rig(device) as r:
        r.copier.gate.set()
        before = r.caches.memory(), bytes(r.slab)
        r.copies.load("r", [CopyPart(0, 0, 1, (0, 1))])
        r.copies.save(1, 0, 0, (3,))
        assert r.copies.wait_all(LONG_S)
        saved, loaded = r.copies.poll()
        assert [end.ok for end in (*saved, *loaded)] == [False, False]
        assert (r.caches.memory(), bytes(r.slab)) == before


def test_close_fails_what_is_queued_and_lets_go_of_the_slab(device: Device) -> None:
    with rig(device) as r:
        r.copies.save(1, 0, 0, [0, 1])
        assert r.copier.entered.wait(LONG_S)
        r.copies.save(2, 0, 1, [0, 1])
        r.copies.load("r", [CopyPart(0, 2, 0, (2, 3))])
        join = r.copies._thread.join
        r.copies._thread.join = lambda s: r.copier.gate.set() or join(s)  # type: ignore[method-assign]
        r.copies.close()
        r.copies.close()
        saved, loaded = told(r)
        assert (sorted(saved), loaded) == ([(1, True), (2, False)], [("r", False)])
        r.copies.save(3, 0, 0, [0, 1])
        r.copies.fence([3])
        assert told(r) == ([(3, False)], [])
        mapping = r.slab.obj
        r.slab.release()
        mapping.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_bug_in_the_copy_thread_leaves_nobody_waiting() -> None:
    with rig(Device("cpu")) as r:
        r.copier.bug_slots = {0}
        r.copies.save(1, 0, 0, [0, 1])
        r.copies.save(2, 0, 1, [0, 1])
        r.copies.load("r", [CopyPart(0, 2, 0, (2, 3))])
        r.copier.gate.set()
        r.copies.fence([1, 2])
        assert r.copies.wait_all(LONG_S)
        saved, loaded = told(r)
        assert (1, False) in saved
        assert (len(saved), len(loaded)) == (2, 1)


def test_a_fence_that_waits_long_says_once_where_the_copy_thread_is(
    device: Device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(copies_module, "LONG_FENCE_S", 0.05)
    with rig(device) as r:
        r.copies.save(7, 0, 0, [0, 1])
        assert r.copier.entered.wait(LONG_S)
        threading.Timer(1.0, r.copier.gate.set).start()  # twenty times as long
        r.copies.fence([7])
        assert r.copies.wait_all(LONG_S)
    (line,) = [record.getMessage() for record in caplog.records if "fence" in record.getMessage()]
    assert "in _pass" in line, "not the stack of the thread that is held up"


@pytest.mark.parametrize("after_start", [False, True])
def test_a_broken_device_is_logged_once_a_minute(
    after_start: bool, caplog: pytest.LogCaptureFixture
) -> None:
    copier = GatedCopier(open_copier(places(build(Shape("LBNHC")))[0]))
    copier.gate.set()
    if after_start:
        lost = HeldTicket("lost", nbytes=1, running=True, lost=True)
        copier.copier.copy_out = lambda part, mark: lost  # type: ignore[method-assign]
    else:
        copier.broken_slots = {0}
    now_s = 0.0
    copies = BlockCopies(copier, clock=lambda: now_s)
    for minute in (1, 2):
        for job in range(100):
            copies.save(job, 0, 0, [0, 1])
        assert copies.wait_all(LONG_S)
        assert {end.ok for end in copies.poll().saved} == {False}
        assert [record.exc_info is not None for record in caplog.records] == [True] * minute
        now_s = 61.0
    copies.close()


def test_a_mark_that_fails_is_a_failed_copy() -> None:
    with rig(Device("cpu")) as r:

        def broken() -> None:
            raise RuntimeError("CUDA error: unspecified launch failure")

        r.copier.mark = broken  # type: ignore[method-assign]
        r.copies.save(1, 0, 0, [0, 1])
        r.copies.load("r", [CopyPart(0, 2, 0, (2, 3))])
        assert told(r) == ([(1, False)], [("r", False)])


def test_seconds_are_of_the_clock_given() -> None:
    now_s = 100.0
    copies = BlockCopies(open_copier(places(build(Shape("LBNHC")))[0]), clock=lambda: now_s)
    copies.save(1, 0, 0, [0, 1])
    assert copies.wait_all(LONG_S)
    now_s = 102.5
    assert copies.poll().saved == [(1, True, 2.5)]
    copies.close()


def test_a_copy_thread_that_cannot_use_the_device_is_told_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(self: CpuCopier) -> None:
        raise RuntimeError("CUDA error: invalid device ordinal")

    monkeypatch.setattr(CpuCopier, "enter_thread", broken)
    where, form = places(build(Shape("LBNHC")))
    slab = memoryview(where.slab)
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        BlockCopies.open(where.layouts, slab, where.slot_bytes, {0: form.header_bytes})
