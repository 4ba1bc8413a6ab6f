"""Moves whole chunks between the engine's paged caches and the slab, beside the engine.

The engine's thread calls `BlockCopies`; one thread of ours starts the copies (on a CPU it performs
them). It works part by part and picks each time, in this order:

    1. saves the engine waits for in `fence`
    2. loads, because a request waits for them
    3. saves

so a load waits for at most one chunk of a save, and a fence for no load but the part under way.

    save ──▶ queued ──copy thread──▶ started ──ticket done──▶ told by `poll`, once
    load ──▶ queued ──part by part─▶ started ──ticket done──▶ told by `poll`, once

Saves end in the order they were started, and so do loads: `poll` asks for the oldest of each.

A copy that fails ends with ok=False and is logged; its slot, or its blocks, then hold anything.
The end is told only when nothing of the copy touches memory any more, also after a failure.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from s3kv.device.copier import COPY_ERRORS, Copier, Ticket
from s3kv.device.cpu import FINISHED, CpuCopier
from s3kv.device.layout import PageLayout
from s3kv.device.paths import Choice, Path
from s3kv.device.places import ChunkPlaces
from s3kv.messages import LoadPart

logger = logging.getLogger(__name__)

_JOIN_TIMEOUT_S = 5.0
"""Far longer than one part takes; a thread that does not end by then hangs in the driver."""
_WAIT_STEP_S = 0.0002
"""How often a wait asks; CUDA events cannot be waited for with a timeout."""


class SavedEnd(NamedTuple):
    """seconds: from the call of `save` to the `poll` that found it done."""

    job_id: int
    ok: bool
    seconds: float


class LoadedEnd(NamedTuple):
    load_id: str
    ok: bool


class CopyEnds(NamedTuple):
    saved: list[SavedEnd]
    loaded: list[LoadedEnd]


@dataclass(frozen=True, slots=True)
class CopyStatistics:
    """Since the start, but `pending`: saves and loads whose end `poll` has not told yet."""

    saves: int
    loads: int
    failures: int
    fences_waited: int
    """Fences that found a save not even started, and had to wait for the copy thread."""
    pending: int
    pinned: bool
    choices: tuple[Choice, ...]
    """On a GPU, how each group's chunks go in each direction, and what that was measured to take.
    """


def open_copier(
    places: ChunkPlaces, path: Path | None = None, idle: Sequence[int] | None = None
) -> Copier:
    """The copier for the device of the caches, which takes over `places`; the rest is for a GPU."""
    if places.device.type == "cpu":
        return CpuCopier(places)
    # Only where there is a GPU: a build of torch without CUDA has half of what it needs.
    from s3kv.device.cuda import CudaGpu
    from s3kv.device.gpu_copier import GpuCopier

    with torch.cuda.device(places.device):
        return GpuCopier(places, CudaGpu(places.device), path, idle)


_Id = TypeVar("_Id", bound=int | str)
_Copy = Callable[[LoadPart, Any, bool], Ticket | None]
"""With the mark, and whether this is the job's last part, whose ticket stands for all of it."""


class _Job(Generic[_Id]):
    """One save or load on its way. The copy thread writes it, under the lock of `BlockCopies`."""

    __slots__ = ("copy", "ident", "line", "mark", "ok", "parts", "since_s", "started", "ticket")

    def __init__(
        self,
        ident: _Id,
        copy: _Copy,
        parts: Iterable[LoadPart],
        line: deque[_Job[_Id]],
        now: float,
    ) -> None:
        self.ident: _Id = ident
        self.copy = copy
        self.parts = deque(parts)
        """Those not begun yet."""
        self.line = line
        """Where it waits to be told, once started; in the order of the starts."""
        self.since_s = now
        self.mark: Any = None
        self.ticket: Ticket = FINISHED
        self.ok = True
        self.started = False
        """True when all parts have been started, or the job has failed."""

    def start(self, ticket: Ticket, ok: bool) -> None:
        """Nothing of the job is left to start. Again is fine: it may come in while the copy thread
        ends, and then both threads say so.
        """
        if self.started:
            return
        self.ticket, self.ok = ticket, ok
        # First, so that `poll` finds whatever `wait_all`, which takes no lock, has found ended.
        self.line.append(self)
        self.started = True

    def is_done(self) -> bool:
        if not self.started:
            return False
        try:
            return self.ticket.done()
        except RuntimeError:
            logger.exception("the device failed under copy %s", self.ident)
            self.ok, self.ticket = False, FINISHED
            return True


class BlockCopies:
    """The copies of one worker. All methods are for the engine's thread, and none raises for a
    copy that fails.

    Orders of the same kind are carried out in the order given; a load and a save are not ordered
    with each other. The caller (the planner) sees to it that a slot is not loaded from before its
    save has ended, and that a load overwrites no block a save still reads: it fences that save
    first, and a load after the fence waits for it.
    """

    def __init__(self, copier: Copier, clock: Callable[[], float] = time.monotonic) -> None:
        """Take over `copier` and start the copy thread. `open` is the usual way in."""
        self._copier = copier
        self._clock = clock
        self._changed = threading.Condition()
        self._urgent: deque[_Job[int]] = deque()
        self._saves: deque[_Job[int]] = deque()
        self._loads: deque[_Job[str]] = deque()
        self._saving: dict[int, _Job[int]] = {}
        self._loading: dict[str, _Job[str]] = {}
        self._saved: deque[_Job[int]] = deque()
        self._loaded: deque[_Job[str]] = deque()
        self._counts = dict.fromkeys(("saves", "loads", "failures", "fences_waited"), 0)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="s3kv-copies", daemon=True)
        self._thread.start()

    @classmethod
    def open(
        cls,
        layouts: Mapping[int, PageLayout],
        slab: memoryview,
        slot_bytes: int,
        header_bytes: Mapping[int, int],
        path: Path | None = None,
        idle: Sequence[int] | None = None,
    ) -> BlockCopies:
        """Copies for the device the caches are on. On a GPU this pins the slab, a second or so for
        a few GiB, and measures which path is the fastest, with empty slots and blocks that nobody
        uses: see `GpuCopier` for `path` and `idle`, and for what else is raised. Other parameters,
        and what is raised, are those of `ChunkPlaces`.
        """
        places = ChunkPlaces(layouts, slab, slot_bytes, header_bytes)
        return cls(open_copier(places, path, idle))

    def save(self, job_id: int, group: int, slot: int, block_ids: Sequence[int]) -> None:
        """Copy all blocks of a chunk to its slot's payload, after everything the engine has
        launched so far on its current stream. Returns at once.

        What it has launched on other streams counts if the current one waits for it already. The
        slot belongs to the copy until `poll` tells its end, the blocks until `fence`.
        Raises `ValueError` for a `job_id` that is still on its way.
        """
        if job_id in self._saving:
            raise ValueError(f"save {job_id} is on its way already")
        part = LoadPart(group, slot, 0, tuple(block_ids))
        job = _Job(job_id, self._copy_out, (part,), self._saved, self._clock())
        self._counts["saves"] += 1
        self._saving[job_id] = job
        self._submit(self._saves, job)

    def load(self, load_id: str, parts: Sequence[LoadPart]) -> None:
        """Copy chunks, or parts of them, from slots to blocks, after everything the engine has
        launched so far on its current stream (other streams: as for `save`). Returns at once.

        Slots and blocks belong to the copy until `poll` tells its end; the engine may use the
        blocks on any stream after that. Raises `ValueError` for a `load_id` still on its way.
        """
        if load_id in self._loading:
            raise ValueError(f"load {load_id} is on its way already")
        job = _Job(load_id, self._copy_in, parts, self._loaded, self._clock())
        self._counts["loads"] += 1
        self._loading[load_id] = job
        self._submit(self._loads, job)

    def fence(self, job_ids: Iterable[int]) -> None:
        """Nothing the engine launches after this call, on the stream current now, overwrites the
        source blocks of these saves before they were read. Unknown and ended ids are fine.

        On a GPU this waits until the copies are launched, and lets the stream wait for the rest;
        on a CPU it blocks until they are done. Raises `RuntimeError` when the device has failed.
        """
        jobs = [job for i in job_ids if (job := self._saving.get(i)) is not None]
        if not jobs:
            return
        with self._changed:
            if not all(job.started for job in jobs):
                self._counts["fences_waited"] += 1
                self._hurry(jobs)
                self._changed.wait_for(lambda: all(job.started for job in jobs))
        for job in jobs:
            job.ticket.fence()

    def poll(self) -> CopyEnds:
        """What has ended since the last call, each exactly once. Does not block."""
        ends = CopyEnds([], [])
        if not self._saving and not self._loading:
            return ends
        now = self._clock()
        for saved in self._ended(self._saved, self._saving):
            ends.saved.append(SavedEnd(saved.ident, saved.ok, now - saved.since_s))
        for loaded in self._ended(self._loaded, self._loading):
            ends.loaded.append(LoadedEnd(loaded.ident, loaded.ok))
        return ends

    def wait_started(self, timeout_s: float) -> bool:
        """Block until every copy has been launched, so that who waits for the device waits for it,
        too; False when time ran out first.
        """
        jobs: list[_Job[Any]] = [*self._saving.values(), *self._loading.values()]
        with self._changed:
            return self._changed.wait_for(lambda: all(job.started for job in jobs), timeout_s)

    def wait_all(self, timeout_s: float) -> bool:
        """Block until every copy has ended, for `poll` to tell; False when time ran out first."""
        jobs: list[_Job[Any]] = [*self._saving.values(), *self._loading.values()]
        return self._wait_until(lambda: all(job.is_done() for job in jobs), timeout_s)

    def wait_load(self, timeout_s: float) -> bool:
        """Block until `poll` has a load's end to tell, or no load is left; False when time ran out
        first.
        """
        loaded = self._loaded
        return self._wait_until(
            lambda: not self._loading or bool(loaded and loaded[0].is_done()), timeout_s
        )

    def statistics(self) -> CopyStatistics:
        return CopyStatistics(
            **self._counts,
            pending=len(self._saving) + len(self._loading),
            pinned=self._copier.pinned,
            choices=self._copier.choices,
        )

    def close(self) -> None:
        """End the copy under way, fail the queued ones, give back slab and pinning. Idempotent.

        Call it before the slab is unmapped or the caches are freed; `wait_all` before it if
        the copies matter. If the copy thread hangs, nothing is given back, and that is logged.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(_JOIN_TIMEOUT_S)
        if self._thread.is_alive():
            logger.error("the copy thread hangs in a copy; its memory stays mapped and pinned")
            return
        self._copier.close()

    def _wait_until(self, holds: Callable[[], bool], timeout_s: float) -> bool:
        deadline = self._clock() + timeout_s
        while not holds():
            if self._clock() >= deadline:
                return False
            time.sleep(_WAIT_STEP_S)
        return True

    def _submit(self, queue: deque[_Job[_Id]], job: _Job[_Id]) -> None:
        try:
            job.mark = self._copier.mark()
        except COPY_ERRORS:
            logger.exception("copy %s failed before it began", job.ident)
            with self._changed:
                job.start(FINISHED, ok=False)
            return
        with self._changed:
            if self._closing:
                job.start(FINISHED, ok=False)
            elif job.parts:
                queue.append(job)
                self._changed.notify_all()
            else:
                job.start(FINISHED, ok=True)

    def _copy_out(self, part: LoadPart, mark: Any, is_last: bool) -> Ticket | None:
        assert is_last, "a save is one part"
        return self._copier.copy_out(part, mark)

    def _copy_in(self, part: LoadPart, mark: Any, is_last: bool) -> Ticket | None:
        return self._copier.copy_in(part, mark, is_last=is_last)

    def _hurry(self, jobs: Iterable[_Job[int]]) -> None:
        for job in jobs:
            if job in self._saves:
                self._saves.remove(job)
                self._urgent.append(job)

    def _ended(self, line: deque[_Job[_Id]], jobs: dict[_Id, _Job[_Id]]) -> Iterator[_Job[_Id]]:
        while line and line[0].is_done():
            job = line.popleft()
            del jobs[job.ident]
            self._counts["failures"] += not job.ok
            yield job

    def _run(self) -> None:
        """The copy thread. Whatever ends it, nobody is left waiting for it."""
        try:
            self._copier.enter_thread()
            while self._start_next():
                pass
        finally:
            self._settle()
            with self._changed:
                self._closing = True
                jobs: list[_Job[Any]] = [*self._saving.values(), *self._loading.values()]
                for job in jobs:
                    if not job.started:
                        job.start(FINISHED, ok=False)
                self._changed.notify_all()

    def _start_next(self) -> bool:
        """Start the next part, once there is one; False when it is time to end."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closing or self._urgent or self._loads or self._saves
            )
            if self._closing:
                return False
            queue: deque[Any] = self._urgent or self._loads or self._saves
            job: _Job[Any] = queue[0]
            part = job.parts.popleft()
            if not job.parts:
                queue.popleft()
        ticket: Ticket | None
        try:
            ticket, ok = job.copy(part, job.mark, not job.parts), True
        except COPY_ERRORS:
            logger.exception("copy %s failed, at %s", job.ident, part)
            self._settle()
            ticket, ok = FINISHED, False
        with self._changed:
            self._record(job, ticket, ok)
        return True

    def _record(self, job: _Job[Any], ticket: Ticket | None, ok: bool) -> None:
        if not ok and job.parts:
            job.parts.clear()
            self._loads.remove(job)
        if not job.parts:
            assert ticket is not None, "the last part has one"
            job.start(ticket, ok)
            self._changed.notify_all()

    def _settle(self) -> None:
        try:
            self._copier.settle()
        except COPY_ERRORS:
            logger.exception("the device failed; what it was copying is lost")
