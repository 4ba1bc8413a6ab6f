"""Chunk copies between the engine's paged caches and the slab, concurrent with the engine.

The engine's thread calls `BlockCopies`. The copy thread starts the copies (on a CPU it performs
them), part by part. It picks the next part in this order:

    1. copies that the engine waits for: saves in `fence`, everything in `wait_started`
    2. loads, because a request waits for them; but every ninth part is a save
    3. saves

In each direction, only enough copies to keep the bus busy are launched (`LaunchWindow`), except
those the engine waits for: a launched copy can no longer be overtaken. So a fence waits for at most
a window of other saves, a load for a window of other loads, and neither for queued ones.

    save ──▶ queued ──copy thread──▶ started ──ticket done──▶ reported by `poll`, once
    load ──▶ queued ──part by part─▶ started ──ticket done──▶ reported by `poll`, once

A copy that fails ends with ok=False, and is logged once a minute; the content of its slot, or its
blocks, is then undefined. `poll` reports an end only once the copy touches no memory any more.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch

from s3kv.device.copier import COPY_ERRORS, Copier
from s3kv.device.copy_jobs import CopyJob, CopyMark, CopyQueue, FailureLog
from s3kv.device.cpu import FINISHED, CpuCopier
from s3kv.device.layout import PageLayout
from s3kv.device.slot_payloads import ChunkPlaces
from s3kv.messages import CopyPart

logger = logging.getLogger(__name__)

_JOIN_TIMEOUT_S = 5.0
"""Far longer than one part takes; a thread that has not ended by then hangs in the driver."""
LONG_FENCE_S = 10.0
_LONG_FENCE = "s3kv: a fence has waited %g s for the copy thread, and still waits:\n%s"
_WAIT_STEP_S = 0.0002
"""Polling interval of a wait; CUDA events cannot be waited for with a timeout."""
_ROOM_STEP_S = 0.0005
"""Polling interval of the copy thread while the window is full. Each poll holds the GIL some µs."""
_LOADS_IN_A_ROW = 8
"""Parts of loads that may be started while a save waits its turn."""


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


def open_copier(places: ChunkPlaces) -> Copier:
    """The copier for the device of the caches. Contract: see `GpuCopier`."""
    if places.device.type == "cpu":
        return CpuCopier(places)
    # Imported only with a GPU, because builds of torch without CUDA lack parts that it needs.
    from s3kv.device.gpu.cuda import CudaGpu
    from s3kv.device.gpu.gpu_copier import GpuCopier

    with torch.cuda.device(places.device):
        return GpuCopier(places, CudaGpu(places.device))


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
        self.copier = copier
        self._clock = clock
        self._changed = threading.Condition()
        """Its lock guards everything below, jobs and tickets included."""
        self._failures = FailureLog(clock)
        self._out: CopyQueue[int] = CopyQueue(copier.copy_out, self._failures, clock)
        self._in: CopyQueue[str] = CopyQueue(copier.copy_in, self._failures, clock)
        self._urgent: deque[CopyJob[Any]] = deque()
        self._loads_in_a_row = 0
        self._closing = False
        self._entered: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="s3kv-copies", daemon=True)
        self._thread.start()

    @classmethod
    def open(
        cls,
        layouts: Mapping[int, PageLayout],
        slab: memoryview,
        slot_bytes: int,
        header_bytes: Mapping[int, int],
    ) -> BlockCopies:
        """Copies for the device the caches are on. The parameters are those of `ChunkPlaces`.

        On a GPU this pins the slab, which takes about a second for a few GiB. Raises what
        `ChunkPlaces` and `GpuCopier` raise, and `RuntimeError` if the copy thread cannot use the
        device.
        """
        copies = cls(open_copier(ChunkPlaces(layouts, slab, slot_bytes, header_bytes)))
        try:
            copies._entered.result()
        except COPY_ERRORS:
            copies.close()
            raise
        return copies

    def mark(self) -> CopyMark:
        """The present point in the engine's work: after all it has launched on its current stream,
        and after the work on others that this stream waits for. Does not block or raise."""
        try:
            return CopyMark(self.copier.mark(), True)
        except COPY_ERRORS as error:
            self._failures.note("the device failed; the copies ordered now fail", error)
            return CopyMark(None, False)

    def save(
        self,
        job_id: int,
        group: int,
        slot: int,
        block_ids: Sequence[int],
        mark: CopyMark | None = None,
    ) -> None:
        """Copy all blocks of a chunk to its slot's payload, after `mark`; None: the present point.
        Returns at once. The slot belongs to the copy until `poll` reports its end, the blocks until
        `fence`. Raises `ValueError` for a `job_id` that is still on its way."""
        self._submit(self._out, job_id, (CopyPart(group, slot, 0, tuple(block_ids)),), mark)

    def load(self, load_id: str, parts: Sequence[CopyPart], mark: CopyMark | None = None) -> None:
        """Copy chunks, or parts of them, from slots to blocks, after `mark`, as `save` does. Slots
        and blocks belong to the copy until `poll` reports its end; after that the engine may use
        the blocks on any stream. Raises `ValueError` for a `load_id` still on its way."""
        self._submit(self._in, load_id, parts, mark)

    def fence(self, job_ids: Iterable[int]) -> None:
        """Keep work that the engine launches after this call on the current stream from overwriting
        the source blocks of these saves before they are read. Unknown and ended ids are ignored.

        On a GPU this blocks until the copies are launched, and the stream waits for the rest. On a
        CPU it blocks until they are done. Raises `RuntimeError` when the device has failed.
        """
        jobs = [job for i in job_ids if (job := self._out.jobs.get(i)) is not None]
        if not jobs:
            return
        with self._changed:
            if not all(job.started for job in jobs) and not self._hurry(jobs, LONG_FENCE_S):
                stack = traceback.format_stack(sys._current_frames().get(self._thread.ident or 0))
                logger.warning(_LONG_FENCE, LONG_FENCE_S, "".join(stack))
                self._hurry(jobs, None)
            for job in jobs:
                job.ticket.fence()

    def poll(self) -> CopyEnds:
        """The copies that have ended since the last call, each exactly once. Does not block."""
        if not self._out.jobs and not self._in.jobs:
            return CopyEnds([], [])
        now = self._clock()
        with self._changed:
            saved = [SavedEnd(job.ident, job.ok, now - job.since_s) for job in self._out.ended()]
            loaded = [LoadedEnd(job.ident, job.ok) for job in self._in.ended()]
        return CopyEnds(saved, loaded)

    def wait_started(self, timeout_s: float) -> bool:
        """Block until every copy has been launched, so that a later wait for the device covers the
        copies. Returns False if time runs out first."""
        with self._changed:
            return self._hurry(self._jobs(), timeout_s)

    def wait_all(self, timeout_s: float) -> bool:
        """Block until every copy has ended, for `poll` to report; False if time runs out first."""
        jobs = self._jobs()
        return self._wait_until(lambda: all(job.is_done() for job in jobs), timeout_s)

    def wait_load(self, timeout_s: float) -> None:
        """Block until `poll` has a load to report, none is left, or time has run out."""
        loads = self._in
        self._wait_until(
            lambda: not loads.jobs or bool(loads.started and loads.started[0].is_done()), timeout_s
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
        self.copier.close()

    def _wait_until(self, holds: Callable[[], bool], timeout_s: float) -> bool:
        deadline = self._clock() + timeout_s
        while True:
            with self._changed:
                if holds():
                    return True
            if self._clock() >= deadline:
                return False
            time.sleep(_WAIT_STEP_S)

    def _jobs(self) -> list[CopyJob[Any]]:
        return [*self._out.jobs.values(), *self._in.jobs.values()]

    def _submit(
        self, queue: CopyQueue[Any], ident: Any, parts: Iterable[CopyPart], mark: CopyMark | None
    ) -> None:
        if ident in queue.jobs:
            raise ValueError(f"copy {ident} is already in flight")
        at, ok = mark or self.mark()
        job = CopyJob(ident, queue, deque(parts), at, self._clock())
        with self._changed:
            queue.jobs[ident] = job
            if self._closing or not ok:
                job.start(FINISHED, ok=False)
            elif job.parts:
                queue.waiting.append(job)
                self._changed.notify_all()
            else:
                job.start(FINISHED, ok=True)

    def _hurry(self, jobs: Sequence[CopyJob[Any]], timeout_s: float | None) -> bool:
        """Start these before all others. Returns False if time runs out first."""
        for job in jobs:
            if job in job.queue.waiting:
                job.queue.waiting.remove(job)
                self._urgent.append(job)
        self._changed.notify_all()
        return self._changed.wait_for(lambda: all(job.started for job in jobs), timeout_s)

    def _run(self) -> None:
        """Body of the copy thread. All jobs end when it ends, for any reason."""
        try:
            self.copier.enter_thread()
            self._entered.set_result(None)
            while self._await_turn():
                self._start_next()
        except COPY_ERRORS as error:
            if self._entered.done():
                raise
            self._entered.set_exception(error)
        finally:
            self._entered.cancel()
            self._settle()
            with self._changed:
                self._closing = True
                for job in self._jobs():
                    job.start(FINISHED, ok=False)
                self._changed.notify_all()

    def _await_turn(self) -> bool:
        """Block until a part may be started. Returns False when it is time to end."""
        with self._changed:
            while not self._closing and self._turn() is None:
                # Only a new order ends the wait of an idle thread; a full window has to be polled.
                self._changed.wait(_ROOM_STEP_S if self._out.waiting or self._in.waiting else None)
            return not self._closing

    def _turn(self) -> CopyJob[Any] | None:
        """The job whose next part may be started now."""
        if self._urgent:
            return self._urgent[0]
        loads, saves = self._in.may_start(), self._out.may_start()
        if loads and (not saves or self._loads_in_a_row < _LOADS_IN_A_ROW):
            return self._in.waiting[0]
        return self._out.waiting[0] if saves else None

    def _start_next(self) -> bool:
        """Start the next part. Returns False if none may be started now."""
        with self._changed:
            job = self._turn()
            if job is None:
                return False
            part, queue = job.parts[0], job.queue
            self._loads_in_a_row = self._loads_in_a_row + 1 if queue is self._in else 0
        try:
            ticket, ok = queue.copy(part, job.at), True
        except COPY_ERRORS as error:
            self._failures.note(f"copy {job.ident} failed at {part}", error)
            self._settle()
            ticket, ok = FINISHED, False
        with self._changed:
            queue.window.add(ticket)
            job.parts.popleft()
            if not ok or not job.parts:
                # It may have become urgent meanwhile.
                (queue.waiting if job in queue.waiting else self._urgent).remove(job)
                job.start(ticket, ok)
                self._changed.notify_all()
        return True

    def _settle(self) -> None:
        try:
            self.copier.settle()
        except COPY_ERRORS as error:
            self._failures.note("the device failed; the copies under way are lost", error)
