"""The worker's side of its I/O process.

`IoClient` belongs to one thread, the worker's engine thread, and has none of its own. Between
`wait_ready` and `drain` no call blocks: `fetch`, `upload` and `cancel` queue a message, `flush`
hands the queue to the kernel, `poll` collects what has ended.

What it promises, whatever happens to the process:

1. Every job ends exactly once, in a list returned by `poll`.
2. When a job has ended, nothing reads or writes its part of the slab on its behalf. Jobs of a
   process that has died end as FAILED, and not before the kernel has confirmed its death.
3. A process that dies, talks nonsense or stops answering is replaced, after a pause that doubles
   from 0.1 s to 30 s while that goes on. Meanwhile jobs fail at the next `poll`.

States, and what moves between them:

    NEW ──start──▶ UP ──hung up, nonsense, silence──▶ DYING ──confirmed dead──▶ DOWN
                   ▲ └──close──▶ CLOSED (from any)                               │
                   └────────────────────────pause over───────────────────────────┘
"""

from __future__ import annotations

import dataclasses
import enum
import select
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass

import msgspec

from s3kv.errors import (
    ConfigError,
    IoProcessError,
    S3KVError,
    StoreDenied,
    StoreMissing,
    StoreUnavailable,
)
from s3kv.host.slab import Slab
from s3kv.io import wire
from s3kv.io.child import Child
from s3kv.types import ChunkKey, ItemShape, Outcome

_PAUSE_FIRST_S = 0.1
_PAUSE_MAX_S = 30.0
_CHECK_S = 1.0
"""How often `poll` asks whether the process is alive, and pings it."""
_SILENCE_MAX_S = 30.0
"""A ping not answered for so long means a process that hangs: its loop never waits for anything."""
_GRACE_S = 2.0
"""For a process to do by itself what it is expected to do: end a drain, or itself."""

_COUNTED = (
    "retries",
    "throttled",
    "window_cuts",
    "hedges",
    "hedges_won",
    "refresh_done",
    "refresh_failed",
    "refresh_skipped",
    "defects",
)

_ERRORS: dict[wire.Trouble, type[S3KVError]] = {
    "config": ConfigError,
    "denied": StoreDenied,
    "missing": StoreMissing,
    "unavailable": StoreUnavailable,
    "defect": IoProcessError,
}


class State(enum.Enum):
    NEW = "new"
    UP = "up"
    DYING = "dying"
    DOWN = "down"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class ClientStatistics:
    """pid: of the present process. outstanding: jobs accepted and not yet returned by `poll`.
    starts, deaths: of processes. process: what the present one last said of itself."""

    state: State
    pid: int | None
    outstanding: int
    starts: int
    deaths: int
    process: wire.Stats | None


class IoClient:
    """Starts, feeds and, if need be, replaces the I/O process of one worker.

    hello: what the process has to know. slab: shared with it; stays the caller's, who closes it
    after the client. clock: seconds, monotonic. module: what the process runs. processors: those
    it may use; None: those of the thread that starts it.
    """

    def __init__(
        self,
        hello: wire.Hello,
        slab: Slab,
        *,
        clock: Callable[[], float] = time.monotonic,
        module: str = "s3kv.io",
        processors: Collection[int] | None = None,
    ) -> None:
        self.counters: Counter[str] = Counter()
        """What all processes there have been said of themselves, up to a second ago."""
        self._hello = hello
        self._slab = slab
        self._clock = clock
        self._module = module
        self._processors = processors
        self._state = State.NEW
        self._child: Child | None = None
        self._ready: wire.Ready | None = None
        self._drained: wire.Drained | None = None
        self._stats: wire.Stats | None = None
        self._outbox: list[wire.Down] = []
        self._outstanding: dict[int, bool] = {}
        """Jobs sent and not ended, and whether they are uploads."""
        self._ended: list[wire.Done] = []
        self._told: dict[str, int] = {}
        """What the present process has said, of what is counted."""
        self._starts = 0
        self._deaths = 0
        self._failures = 0
        self._started_s = self._checked_s = self._kill_s = self._restart_s = 0.0
        self._pinged_s: float | None = None
        self._why_dying = ""

    # Start and end: these may block.

    def start(self) -> None:
        """Start the process and return. Jobs may follow at once; they wait in it.

        Raises `IoProcessError` when the system starts no process.
        """
        if self._state is not State.NEW:
            raise IoProcessError(f"the I/O client cannot be started: it is {self._state.value}")
        try:
            self._spawn(self._hello)
        except OSError as error:
            raise IoProcessError(f"the I/O process could not be started: {error}") from error

    def wait_ready(self, timeout_s: float) -> wire.Ready:
        """Wait until the process has tried the bucket.

        Returns its answer, whose `trouble` tells that it serves in spite of something. Raises
        what the trouble is when it does not serve, and `IoProcessError` when it died or gave no
        answer in time. After an error the client is closed.
        """
        deadline_s = time.monotonic() + timeout_s
        self._wait(lambda: self._ready is not None, deadline_s)
        ready = self._ready
        if ready is not None and ready.serving:
            return ready
        reason = self._why_dying or f"the I/O process gave no answer within {timeout_s:g} s"
        self.close()
        if ready is None or ready.trouble is None:
            raise IoProcessError(reason)
        raise _ERRORS[ready.trouble](ready.message)

    def drain(self, timeout_s: float) -> int:
        """Give up fetches, wait for uploads, `timeout_s` at most. Returns the uploads left.

        What ended meanwhile is returned by the next `poll`. Afterwards only `poll` and `close`.
        Should the worker be killed while it waits here, the process still uses its time.
        """
        uploads = {job_id for job_id, is_upload in self._outstanding.items() if is_upload}
        if self._state is State.UP and self._outstanding:
            self._outbox.append(wire.Drain(timeout_s))
            deadline_s = time.monotonic() + timeout_s + _GRACE_S
            self._wait(lambda: self._drained is not None, deadline_s)
        if self._drained is not None:
            return self._drained.left
        return len(uploads - {end.job_id for end in self._ended if end.outcome.is_success})

    def close(self) -> None:
        """End the process, by force after 2 s. Idempotent. Nothing uses the slab afterwards.

        Jobs not returned by `poll` before are not returned any more.
        """
        if self._child is not None:
            self._child.end(_GRACE_S)
            self._child = None
        self._state = State.CLOSED
        self._outstanding.clear()
        self._ended.clear()
        self._outbox.clear()

    def _wait(self, done: Callable[[], bool], deadline_s: float) -> None:
        """Exchange messages until `done`, the deadline, or the process's end."""
        while self._state is State.UP and self._child is not None and not done():
            self.flush()
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return
            _await_input(self._child, left_s)
            self._receive(self._child)
        while self._state is State.DYING and time.monotonic() < deadline_s:
            self._bury()
            time.sleep(0.001)

    # While the engine runs: nothing below blocks.

    def fetch(self, job_id: int, key: ChunkKey, offset: int, item: ItemShape | None = None) -> None:
        """Fill the slab from `offset` with the object of `key`: of an item, if it has a shape.

        From now until the job has ended, that part of the slab is the I/O process's. `job_id` is
        none of those that have not ended: `ValueError`. Sent by the next `flush` or `poll`.
        """
        self._submit(wire.Fetch(job_id, key.group, key.block_hash, offset, item))

    def upload(
        self, job_id: int, key: ChunkKey, offset: int, item: ItemShape | None = None
    ) -> None:
        """Send the object whose payload lies behind its header's place at `offset`. As `fetch`."""
        self._submit(wire.Upload(job_id, key.group, key.block_hash, offset, item))

    def cancel(self, job_id: int) -> None:
        """Hurry the end of a job. It still ends, as CANCELLED or as it would have anyway."""
        if self._state is State.UP and job_id in self._outstanding:
            self._outbox.append(wire.Cancel(job_id))

    def withdraw(self, job_id: int) -> None:
        """End a job as CANCELLED if it has not begun, and leave it alone otherwise."""
        if self._state is State.UP and job_id in self._outstanding:
            self._outbox.append(wire.Withdraw(job_id))

    def flush(self) -> None:
        """Send what is queued, as far as the socket takes it."""
        if self._state is not State.UP or self._child is None:
            return
        if self._outbox or self._child.has_unsent:
            self._child.send(self._outbox)
            self._outbox.clear()

    def poll(self, linger_s: float = 0.0) -> list[wire.Done]:
        """The jobs that have ended since the last call. Call it every engine step.

        With `linger_s`, and when jobs are under way, it waits so long for something to end.
        """
        if self._state is State.UP and self._child is not None:
            self.flush()
            if linger_s and self._outstanding:
                _await_input(self._child, linger_s)
            self._receive(self._child)
            self._look_after(self._child)
        if self._state is State.DYING:
            self._bury()
        if self._state is State.DOWN and self._clock() >= self._restart_s:
            self._restart()
        ended, self._ended = self._ended, []
        return ended

    def statistics(self) -> ClientStatistics:
        return ClientStatistics(
            state=self._state,
            pid=self._child.pid if self._child is not None else None,
            outstanding=len(self._outstanding) + len(self._ended),
            starts=self._starts,
            deaths=self._deaths,
            process=self._stats,
        )

    def _submit(self, message: wire.Fetch | wire.Upload) -> None:
        if message.job_id in self._outstanding:
            raise ValueError(f"job {message.job_id} has not ended yet")
        if self._state is State.UP:
            self._outstanding[message.job_id] = isinstance(message, wire.Upload)
            self._outbox.append(message)
        else:
            self._fail(message.job_id, f"the I/O process is {self._state.value}")

    def _fail(self, job_id: int, reason: str) -> None:
        self._ended.append(wire.Done(job_id, Outcome.FAILED, 0, 0.0, reason))

    def _receive(self, child: Child) -> None:
        try:
            for message in child.receive():
                self._take(message)
        except wire.WireError as error:
            self._give_up(f"the I/O process {child.pid} talks nonsense: {error}")
        if child.hung_up:
            # It should be about to end by itself, and may have something to say on stderr.
            self._give_up("", grace_s=_GRACE_S)

    def _take(self, message: wire.Up) -> None:
        match message:
            case wire.Done(job_id):
                if job_id not in self._outstanding:
                    raise wire.WireError(f"job {job_id}, done or never sent, is done")
                del self._outstanding[job_id]
                self._ended.append(message)
            case wire.Stats():
                self._count(message)
                self._stats = message
                self._pinged_s = None
            case wire.Ready():
                self._ready = message
            case wire.Drained():
                self._drained = message

    def _count(self, stats: wire.Stats) -> None:
        told = {f"io_{name}": int(getattr(stats, name)) for name in _COUNTED}
        told |= {f"io_requests|{name}": count for name, count in stats.requests.items()}
        told["cost_usd"] = stats.cost_nanousd  # the unit of the metric while it travels
        for name, value in told.items():
            self.counters[name] += value - self._told.get(name, 0)
        self._told = told

    def _look_after(self, child: Child) -> None:
        now_s = self._clock()
        if self._state is not State.UP or now_s - self._checked_s < _CHECK_S:
            return
        self._checked_s = now_s
        if child.is_dead():
            # Its end of the stream can outlive it in a process forked while it was started.
            self._give_up("")
        elif self._pinged_s is None:
            self._pinged_s = now_s
            self._outbox.append(wire.Ping())
        elif now_s - self._pinged_s > _SILENCE_MAX_S:
            self._give_up(f"the I/O process {child.pid} does not answer")

    def _give_up(self, reason: str, grace_s: float = 0.0) -> None:
        if self._state is State.UP:
            self._why_dying = reason
            self._kill_s = self._clock() + grace_s
            self._state = State.DYING

    def _bury(self) -> None:
        if self._child is None:
            return
        if not self._child.is_dead():
            if self._clock() >= self._kill_s:
                self._child.kill()
            return
        self._why_dying = self._why_dying or self._child.last_words()
        self._child.end(0.0)
        self._child = None
        for job_id in self._outstanding:
            self._fail(job_id, self._why_dying)
        self._outstanding.clear()
        self._outbox.clear()
        self._deaths += 1
        self._down()

    def _down(self) -> None:
        now_s = self._clock()
        lived_long = now_s - self._started_s > _PAUSE_MAX_S
        self._failures = 1 if lived_long else self._failures + 1
        self._restart_s = now_s + min(_PAUSE_MAX_S, _PAUSE_FIRST_S * 2 ** (self._failures - 1))
        self._state = State.DOWN

    def _restart(self) -> None:
        # The bucket has been tried once. Should it be away just now, that is no reason to stop.
        config = dataclasses.replace(self._hello.config, on_unavailable="serve")
        try:
            self._spawn(msgspec.structs.replace(self._hello, config=config))
        except OSError:
            self._down()
        else:
            self.counters["io_restarts"] += 1

    def _spawn(self, hello: wire.Hello) -> None:
        self._started_s = self._checked_s = self._clock()
        self._ready = self._stats = self._pinged_s = None
        self._told = {}
        self._why_dying = ""
        self._child = Child(self._slab.fd, self._module)
        if self._processors is not None:
            self._child.run_on(self._processors)
        self._state = State.UP
        self._starts += 1
        self._outbox.append(hello)
        self.flush()


def _await_input(child: Child, timeout_s: float) -> None:
    """Until `child` has said something, or can be told what was queued for it."""
    poller = select.poll()  # select() takes no descriptor above 1023
    wanted = select.POLLOUT if child.has_unsent else 0
    poller.register(child, select.POLLIN | wanted)
    poller.poll(timeout_s * 1000)
