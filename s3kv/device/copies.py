"""Chunk copies between the engine's paged caches and the slab, concurrent with the engine.

The engine's thread calls `BlockCopies`. The copy thread starts the copies (on a CPU it performs
them), part by part. It picks the next part in this order:

    1. saves the engine waits for in `fence`
    2. loads, because a request waits for them
    3. saves

So a load waits for at most one chunk of a save, and a fence for at most the load part under way.

    save ──▶ queued ──copy thread──▶ started ──ticket done──▶ reported by `poll`, once
    load ──▶ queued ──part by part─▶ started ──ticket done──▶ reported by `poll`, once

Saves end in the order they were started, and so do loads: `poll` asks for the oldest of each.

A copy that fails ends with ok=False and is logged; the content of its slot, or of its blocks, is
then undefined. `poll` reports an end only once the copy touches no memory any more, failed or not.
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

from s3kv.device.copier import COPY_ERRORS, Copier, Path, PathChoice, Ticket
from s3kv.device.cpu import FINISHED, CpuCopier
from s3kv.device.layout import PageLayout
from s3kv.device.slot_payloads import ChunkPlaces
from s3kv.messages import LoadPart

logger = logging.getLogger(__name__)

_JOIN_TIMEOUT_S = 5.0
"""Far longer than one part takes; a thread that has not ended by then hangs in the driver."""
_WAIT_STEP_S = 0.0002
"""Polling interval of a wait; CUDA events cannot be waited for with a timeout."""


class SavedEnd(NamedTuple):
    """The end of a save. seconds: from the call of `save` to the `poll` that found it done."""

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
    """Counts since the start; only `pending` counts saves and loads not yet reported by `poll`."""

    saves: int
    loads: int
    failures: int
    fences_waited: int
    """Fences that had to wait for the copy thread, because a save had not been started."""
    pending: int
    pinned: bool
    choices: tuple[PathChoice, ...]
    """On a GPU: the path of each group's chunks in each direction, and its measured time."""


def open_copier(
    places: ChunkPlaces, path: Path | None = None, idle: Sequence[int] | None = None
) -> Copier:
    """The copier for the device of the caches; takes over `places`. path, idle: see `GpuCopier`."""
    if places.device.type == "cpu":
        return CpuCopier(places)
    # Imported only with a GPU, because builds of torch without CUDA lack parts that it needs.
    from s3kv.device.gpu.cuda import CudaGpu
    from s3kv.device.gpu.gpu_copier import GpuCopier

    with torch.cuda.device(places.device):
        return GpuCopier(places, CudaGpu(places.device), path, idle)


_Id = TypeVar("_Id", bound=int | str)
_Copy = Callable[[LoadPart, Any, bool], Ticket | None]
"""Called with a part, the mark, and whether it is the job's last part, whose ticket stands for the
whole job."""


class _CopyJob(Generic[_Id]):
    """One save or load on its way. The copy thread writes it, under the lock of `BlockCopies`."""

    __slots__ = ("copy", "ident", "line", "mark", "ok", "parts", "since_s", "started", "ticket")

    def __init__(
        self,
        ident: _Id,
        copy: _Copy,
        parts: Iterable[LoadPart],
        line: deque[_CopyJob[_Id]],
        now: float,
    ) -> None:
        self.ident: _Id = ident
        self.copy = copy
        self.parts = deque(parts)
        """Parts that have not begun."""
        self.line = line
        """The queue in which it waits to be reported, once started; in the order of the starts."""
        self.since_s = now
        self.mark: Any = None
        self.ticket: Ticket = FINISHED
        self.ok = True
        self.started = False
        """Whether all parts have been started, or the job has failed."""

    def start(self, ticket: Ticket, ok: bool) -> None:
        """Record that no part is left to start. A second call does nothing: if the job is submitted
        while the copy thread ends, both threads call this.
        """
        if self.started:
            return
        self.ticket, self.ok = ticket, ok
        # Set before `started`: `wait_all` takes no lock, and `poll` must then find the job.
        self.line.append(self)
        self.started = True

    def is_done(self) -> bool:
        if not self.started:
            return False
        try:
            return self.ticket.done()
        except RuntimeError:
            logger.exception("s3kv: the device failed during copy %s", self.ident)
            self.ok, self.ticket = False, FINISHED
            return True


class BlockCopies:
    """The copies of one worker. Call all methods on the engine's thread. No method raises for a
    failed copy.

    Orders of the same kind are carried out in the order given; a load and a save are not ordered
    against each other. The caller (the planner) ensures that no slot is loaded from before its
    save has ended, and that a load overwrites no block a save still reads: it fences that save
    first, and a load after the fence waits for it.
    """

    def __init__(self, copier: Copier, clock: Callable[[], float] = time.monotonic) -> None:
        """Take over `copier` and start the copy thread. Most callers use `open`."""
        self._copier = copier
        self._clock = clock
        self._changed = threading.Condition()
        self._urgent: deque[_CopyJob[int]] = deque()
        self._saves: deque[_CopyJob[int]] = deque()
        self._loads: deque[_CopyJob[str]] = deque()
        self._saving: dict[int, _CopyJob[int]] = {}
        self._loading: dict[str, _CopyJob[str]] = {}
        self._saved: deque[_CopyJob[int]] = deque()
        self._loaded: deque[_CopyJob[str]] = deque()
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
        """Copies for the device the caches are on.

        On a GPU this pins the slab, which takes about a second for a few GiB, and measures which
        path is fastest, with empty slots and unused blocks. path, idle: see `GpuCopier`.
        The other parameters are those of `ChunkPlaces`. Raises what these two raise.
        """
        places = ChunkPlaces(layouts, slab, slot_bytes, header_bytes)
        return cls(open_copier(places, path, idle))

    def save(self, job_id: int, group: int, slot: int, block_ids: Sequence[int]) -> None:
        """Copy all blocks of a chunk to its slot's payload, after everything the engine has
        launched so far on its current stream. Returns at once.

        Work on other streams counts only if the current stream already waits for it. The slot
        belongs to the copy until `poll` reports its end, the blocks until `fence`.
        Raises `ValueError` for a `job_id` that is still on its way.
        """
        if job_id in self._saving:
            raise ValueError(f"save {job_id} is already on its way")
        part = LoadPart(group, slot, 0, tuple(block_ids))
        job = _CopyJob(job_id, self._copy_out, (part,), self._saved, self._clock())
        self._counts["saves"] += 1
        self._saving[job_id] = job
        self._submit(self._saves, job)

    def load(self, load_id: str, parts: Sequence[LoadPart]) -> None:
        """Copy chunks, or parts of them, from slots to blocks, after everything the engine has
        launched so far on its current stream (other streams: as for `save`). Returns at once.

        Slots and blocks belong to the copy until `poll` reports its end; after that the engine may
        use the blocks on any stream. Raises `ValueError` for a `load_id` still on its way.
        """
        if load_id in self._loading:
            raise ValueError(f"load {load_id} is already on its way")
        job = _CopyJob(load_id, self._copy_in, parts, self._loaded, self._clock())
        self._counts["loads"] += 1
        self._loading[load_id] = job
        self._submit(self._loads, job)

    def fence(self, job_ids: Iterable[int]) -> None:
        """Keep what the engine launches after this call, on the current stream, from overwriting
        the source blocks of these saves before they are read. Unknown and ended ids are ignored.

        On a GPU this blocks until the copies are launched, and the stream waits for the rest. On a
        CPU it blocks until they are done. Raises `RuntimeError` when the device has failed.
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
        """The copies that have ended since the last call, each exactly once. Does not block."""
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
        """Block until every copy has been launched, so that a caller who then waits for the device
        waits for the copies, too. Returns False when time ran out first.
        """
        jobs: list[_CopyJob[Any]] = [*self._saving.values(), *self._loading.values()]
        with self._changed:
            return self._changed.wait_for(lambda: all(job.started for job in jobs), timeout_s)

    def wait_all(self, timeout_s: float) -> bool:
        """Block until every copy has ended, for `poll` to report; False when time ran out first."""
        jobs: list[_CopyJob[Any]] = [*self._saving.values(), *self._loading.values()]
        return self._wait_until(lambda: all(job.is_done() for job in jobs), timeout_s)

    def wait_load(self, timeout_s: float) -> bool:
        """Block until `poll` has a load's end to report, or no load is left. Returns False when
        time ran out first.
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
        """Finish the copy under way, fail the queued ones, release slab and pinning. Idempotent.

        Call it before the slab is unmapped or the caches are freed. If the copies matter, call
        `wait_all` first. If the copy thread hangs, nothing is released, and that is logged.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(_JOIN_TIMEOUT_S)
        if self._thread.is_alive():
            logger.error("s3kv: the copy thread hangs; its memory stays mapped and pinned")
            return
        self._copier.close()

    def _wait_until(self, holds: Callable[[], bool], timeout_s: float) -> bool:
        deadline = self._clock() + timeout_s
        while not holds():
            if self._clock() >= deadline:
                return False
            time.sleep(_WAIT_STEP_S)
        return True

    def _submit(self, queue: deque[_CopyJob[_Id]], job: _CopyJob[_Id]) -> None:
        try:
            job.mark = self._copier.mark()
        except COPY_ERRORS:
            logger.exception("s3kv: copy %s failed before it began", job.ident)
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

    def _hurry(self, jobs: Iterable[_CopyJob[int]]) -> None:
        for job in jobs:
            if job in self._saves:
                self._saves.remove(job)
                self._urgent.append(job)

    def _ended(
        self, line: deque[_CopyJob[_Id]], jobs: dict[_Id, _CopyJob[_Id]]
    ) -> Iterator[_CopyJob[_Id]]:
        while line and line[0].is_done():
            job = line.popleft()
            del jobs[job.ident]
            self._counts["failures"] += not job.ok
            yield job

    def _run(self) -> None:
        """Body of the copy thread. However it ends, all its jobs end, too."""
        try:
            self._copier.enter_thread()
            while self._start_next():
                pass
        finally:
            self._settle()
            with self._changed:
                self._closing = True
                jobs: list[_CopyJob[Any]] = [*self._saving.values(), *self._loading.values()]
                for job in jobs:
                    if not job.started:
                        job.start(FINISHED, ok=False)
                self._changed.notify_all()

    def _start_next(self) -> bool:
        """Start the next part, once there is one. Returns False when it is time to end."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closing or self._urgent or self._loads or self._saves
            )
            if self._closing:
                return False
            queue: deque[Any] = self._urgent or self._loads or self._saves
            job: _CopyJob[Any] = queue[0]
            part = job.parts.popleft()
            if not job.parts:
                queue.popleft()
        ticket: Ticket | None
        try:
            ticket, ok = job.copy(part, job.mark, not job.parts), True
        except COPY_ERRORS:
            logger.exception("s3kv: copy %s failed at %s", job.ident, part)
            self._settle()
            ticket, ok = FINISHED, False
        with self._changed:
            self._record(job, ticket, ok)
        return True

    def _record(self, job: _CopyJob[Any], ticket: Ticket | None, ok: bool) -> None:
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
            logger.exception("s3kv: the device failed; the copies under way are lost")
