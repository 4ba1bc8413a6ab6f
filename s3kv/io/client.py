"""Client of the I/O process, in its worker.

`IoClient` belongs to the worker's engine thread. It starts no thread but the one that logs what the
process prints (`io.process_log`). Between `wait_ready` and `drain`, `fetch`, `upload` and `cancel`
queue a message, `flush` hands the queue to the kernel, `poll` collects the ends of jobs. Of these
only `poll` blocks: for its `linger_s` and, if the process has died, for up to 0.2 s until its last
lines are logged, and while the next process is started.

It guarantees, whatever happens to the process:

1. Every job ends exactly once, in a list returned by `poll`.
2. When a job has ended, nothing reads or writes its part of the slab on its behalf. Jobs of a
   process that has died end as FAILED, after the kernel has confirmed its death.
3. A process that dies, breaks the protocol or stops answering is replaced, after a pause that
   doubles from 0.1 s to 30 s while this continues. Meanwhile jobs fail at the next `poll`.
4. An invalid job raises at the call. A job that crashes the process ends as INVALID, and so does
   every later job like it; the jobs beside it survive (`io.orders`).

States and transitions:

    NEW ──start──▶ UP ─hung up, bad message, silence─▶ DYING ──confirmed dead──▶ DOWN
                   ▲ └──close──▶ CLOSED (from any)                               │
                   └────────────────────────pause over───────────────────────────┘
"""

from __future__ import annotations

import dataclasses
import enum
import select
import time
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
from s3kv.io.formats import Formats
from s3kv.io.orders import Orders
from s3kv.messages import JobEnd
from s3kv.types import ChunkKey, ItemShape, Tally

_PAUSE_FIRST_S = 0.1
_PAUSE_MAX_S = 30.0
_CHECK_S = 1.0
"""Interval at which `poll` checks that the process is alive, and pings it. If the process owes no
answer, `poll` reads the stream only then."""
_SILENCE_MAX_S = 30.0
"""Time after which an unanswered ping means that the process hangs; its loop never blocks."""
_GRACE_S = 2.0
"""Time that a process gets to end a drain, or to exit by itself."""

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
    """State and counters of an `IoClient`. pid: of the current process. outstanding: jobs accepted
    and not yet returned by `poll`. starts, deaths: counts of processes. process: latest statistics
    of the current one."""

    state: State
    pid: int | None
    outstanding: int
    starts: int
    deaths: int
    process: wire.Stats | None


class IoClient:
    """Starts the I/O process of one worker, sends it jobs, and replaces it if it fails.

    handshake: configuration of the process. slab: shared with the process; the caller owns it, and
    closes it after the client. clock: seconds, monotonic. module: the module that the process runs.
    processors: cores it may use; None: those of the thread that starts it.
    """

    def __init__(
        self,
        handshake: wire.Handshake,
        slab: Slab,
        *,
        clock: Callable[[], float] = time.monotonic,
        module: str = "s3kv.io",
        processors: Collection[int] | None = None,
    ) -> None:
        self.counters = Tally()
        """Sums over all processes so far, at most about one second old."""
        self._handshake = handshake
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
        self._orders = Orders(Formats(handshake, slab.nbytes), clock)
        self._told: dict[str, int] = {}
        """Counters that the current process has reported so far."""
        self._starts = 0
        self._deaths = 0
        self._failures = 0
        self._started_s = self._checked_s = self._kill_s = self._restart_s = 0.0
        self._pinged_s: float | None = None
        self._why_dying = ""
        self._broke_protocol = False

    # Start and end: these may block.

    def start(self) -> None:
        """Start the process, without waiting for it. Jobs may follow at once, and wait in it.

        Raises `IoProcessError` if the process cannot be started, or was started before.
        """
        if self._state is not State.NEW:
            raise IoProcessError(f"the I/O client cannot be started: it is {self._state.value}")
        try:
            self._spawn(self._handshake)
        except OSError as error:
            raise IoProcessError(f"the I/O process could not be started: {error}") from error

    def wait_ready(self, timeout_s: float) -> wire.Ready:
        """Wait until the process has tried the bucket.

        Returns its answer; if that contains a `trouble`, the process serves nevertheless. Raises
        the error for the trouble if the process does not serve, and `IoProcessError` if it died or
        did not answer within `timeout_s`. After an error the client is closed.
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
        """Give up fetches and wait up to `timeout_s` for uploads. Returns the uploads left.

        The next `poll` returns the jobs that ended meanwhile. Call only `poll` and `close`
        afterwards. If the worker is killed while it waits here, the process still uses its time.
        """
        orders, uploads = self._orders, self._orders.uploads()
        deadline_s = time.monotonic() + timeout_s
        # Nothing can be sent after a Drain, and suspects are sent in turn.
        orders.cancel_waiting(uploads_too=False)
        self._wait(lambda: not orders.any_waiting, deadline_s)
        late = orders.cancel_waiting(uploads_too=True)
        if self._state is State.UP and orders.any_outstanding:
            self._outbox.append(wire.Drain(max(0.0, deadline_s - time.monotonic())))
            self._wait(lambda: self._drained is not None, deadline_s + _GRACE_S)
        if self._drained is not None:
            return self._drained.left + late
        return len(uploads - orders.uploaded())

    def close(self) -> None:
        """End the process, by force after 2 s. Idempotent. Nothing uses the slab afterwards.

        Jobs that `poll` has not returned yet are never returned.
        """
        if self._child is not None:
            self._child.end(_GRACE_S)
            self._child = None
        self._state = State.CLOSED
        self._orders.forget()
        self._outbox.clear()

    def _wait(self, done: Callable[[], bool], deadline_s: float) -> None:
        """Exchange messages until `done`, the deadline, or the end of the process."""
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

    # While the engine runs: nothing below blocks but `poll`.

    def fetch(self, job_id: int, key: ChunkKey, offset: int, item: ItemShape | None = None) -> None:
        """Fetch the object of `key` into the slab at `offset`. item: the shape of an item.

        The I/O process owns that part of the slab until the job has ended. The next `flush` or
        `poll` sends the job. Raises `ValueError` if a job with this id has not ended, and
        `TypeError` or `ValueError` for a job that cannot be carried out (`Formats.of`); nothing is
        sent then, and no end follows.
        """
        self._submit(wire.Fetch(job_id, key.group, key.block_hash, offset, item))

    def upload(
        self, job_id: int, key: ChunkKey, offset: int, item: ItemShape | None = None
    ) -> None:
        """Upload the object at `offset`: room for its header, then its payload. As `fetch`."""
        self._submit(wire.Upload(job_id, key.group, key.block_hash, offset, item))

    def use(self, job_id: int, key: ChunkKey) -> None:
        """Report a use of the object of `key` that was not read. The end says whether the bucket
        has it: EXISTS or MISSING; CANCELLED if it is not known."""
        self._submit(wire.Look(job_id, key.group, key.block_hash))

    def cancel(self, job_id: int) -> None:
        """Ask for a job to end soon. It ends as CANCELLED, or as it would have otherwise."""
        if self._orders.cancel(job_id) and self._state is State.UP:
            self._outbox.append(wire.Cancel(job_id))

    def withdraw(self, job_id: int) -> None:
        """Cancel a job if it has not begun; otherwise do nothing."""
        if self._orders.cancel(job_id) and self._state is State.UP:
            self._outbox.append(wire.Withdraw(job_id))

    def flush(self) -> None:
        """Send as much of the queue as the socket takes."""
        if self._state is not State.UP or self._child is None:
            return
        if self._has_unsent:
            self._child.send(self._outbox)
            self._outbox.clear()

    def poll(self, linger_s: float = 0.0) -> list[JobEnd]:
        """Return the ends of jobs since the last call, and log failures. Call it every engine step.

        linger_s: longest wait for a message of the process while jobs are under way.
        """
        if not self.is_due:
            return []
        if self._state is State.UP and self._child is not None:
            self.flush()
            if linger_s and self._orders.any_outstanding:
                _await_input(self._child, linger_s)
            self._receive(self._child)
            self._look_after(self._child)
            self.flush()
        if self._state is State.DYING:
            self._bury()
        if self._state is State.DOWN and self._clock() >= self._restart_s:
            self._restart()
        return self._orders.take_ends()

    def statistics(self) -> ClientStatistics:
        return ClientStatistics(
            state=self._state,
            pid=self._child.pid if self._child is not None else None,
            outstanding=len(self._orders),
            starts=self._starts,
            deaths=self._deaths,
            process=self._stats,
        )

    def _submit(self, job: wire.Order) -> None:
        why_down = "" if self._state is State.UP else f"the I/O process is {self._state.value}"
        if self._orders.add(job, why_down):
            self._outbox.append(job)
        else:
            self._release()

    def _release(self) -> None:
        """Send the suspects whose turn has come, once the process has sent `Ready`."""
        if self._ready is not None and self._state is State.UP:
            self._outbox += self._orders.release()

    @property
    def is_due(self) -> bool:
        """Whether there is anything to do for `poll`. In most steps there is not, and they are
        spared the system calls."""
        return (
            self._state is not State.UP
            or self._ready is None
            or self._pinged_s is not None
            or len(self._orders) > 0
            or self._has_unsent
            or self._clock() - self._checked_s >= _CHECK_S
        )

    @property
    def _has_unsent(self) -> bool:
        return bool(self._outbox) or (self._child is not None and self._child.has_unsent)

    def _receive(self, child: Child) -> None:
        try:
            for message in child.receive():
                self._take(message)
        except wire.WireError as error:
            self._broke_protocol = True
            self._give_up(f"the I/O process {child.pid} breaks the protocol: {error}")
        if child.hung_up:
            # The process is probably exiting by itself, and may still print why.
            self._give_up("", grace_s=_GRACE_S)

    def _take(self, message: wire.Up) -> None:
        match message:
            case JobEnd():
                self._orders.ended(message)
                self._release()
            case wire.Stats():
                self._count(message)
                self._stats = message
                self._pinged_s = None
            case wire.Ready():
                self._ready = message
                self._release()
            case wire.Drained():
                self._drained = message

    def _count(self, stats: wire.Stats) -> None:
        for name, value in stats.counters.items():
            self.counters[name] += value - self._told.get(name, 0)
        self._told = stats.counters

    def _look_after(self, child: Child) -> None:
        now_s = self._clock()
        if self._state is not State.UP or now_s - self._checked_s < _CHECK_S:
            return
        self._checked_s = now_s
        if child.is_dead():
            # A process forked during the start may hold the other end of the stream open.
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
        crashed = self._broke_protocol or not self._child.was_killed
        self._child.end(0.0)
        self._child = None
        self._orders.died(self._why_dying, crashed=crashed)
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
        # The bucket was tried at the first start. An outage is no reason to stop now.
        config = dataclasses.replace(self._handshake.config, on_unavailable="serve")
        try:
            self._spawn(msgspec.structs.replace(self._handshake, config=config))
        except OSError:
            self._down()
        else:
            self.counters["io_restarts"] += 1

    def _spawn(self, handshake: wire.Handshake) -> None:
        self._started_s = self._checked_s = self._clock()
        self._ready = self._stats = self._pinged_s = None
        self._told = {}
        self._why_dying, self._broke_protocol = "", False
        self._child = Child(self._slab.fd, self._module)
        if self._processors is not None:
            self._child.run_on(self._processors)
        self._state = State.UP
        self._starts += 1
        self._outbox.append(handshake)
        self.flush()


def _await_input(child: Child, timeout_s: float) -> None:
    """Wait until `child` has sent something, or can take queued messages."""
    poller = select.poll()  # select() takes no descriptor above 1023
    poller.register(child, select.POLLIN | (select.POLLOUT if child.has_unsent else 0))
    poller.poll(timeout_s * 1000)
