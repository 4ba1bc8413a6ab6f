"""Client of the I/O process, in its worker.

`IoClient` belongs to the worker's engine thread. It starts only one thread, which logs the output
of the process (`io.process_log`). Between `wait_ready` and `drain`, `submit` and `cancel` queue a
message, `flush` passes the queue to the kernel, and `poll` collects the ends of jobs. Of these only
`poll` blocks: for its `linger_s` and, if the process has died, for up to 0.2 s until its last lines
are logged, and while the next process is started.

It guarantees, whatever happens to the process:

1. Every job ends exactly once, in a list returned by `poll`.
2. When a job has ended, nothing reads or writes its part of the slab on its behalf. Jobs of a
   process that has died end as FAILED, after the kernel has confirmed its death.
3. A process that dies, breaks the protocol, stops answering or cannot serve is replaced, after a
   pause that doubles from 0.1 s to 30 s while this continues. Meanwhile jobs fail at the next
   `poll`.
4. An invalid job ends as INVALID. So does every repetition of a job that has crashed the process
   three times (`io.outstanding`).

`io.process_life` decides when a process is given up, killed and replaced; `io.child` is the
transport to it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

import msgspec

from s3kv.errors import IoProcessError
from s3kv.host.slab import Slab
from s3kv.io import wire
from s3kv.io.child import Child
from s3kv.io.outstanding import OutstandingJobs
from s3kv.io.process_life import CHECK_S, Heartbeat, ProcessLife, State
from s3kv.messages import BucketJob, JobEnd, JobKind
from s3kv.types import Tally

_GRACE_S, _CANCELLED_S = 2.0, 1.0
"""Times that a process gets: to end a drain, or exit by itself; and to end cancelled jobs."""


@dataclass(slots=True)
class _Answers:
    """The answers of the current process so far. stats: the latest."""

    ready: wire.Ready | None = None
    drained: wire.Drained | None = None
    stats: wire.Stats | None = None


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
        self.life = ProcessLife()
        """For reading only."""
        self._handshake, self._clock = handshake, clock
        self._jobs = OutstandingJobs(clock)
        self._make_child: Callable[[], Child] = lambda: Child(slab.fd, module, processors)
        self._child: Child | None = None
        self._heartbeat = Heartbeat(0.0)
        self._answers = _Answers()

    # Start and end: these may block.

    def start(self) -> None:
        """Start the process, without waiting for it. Jobs may be submitted at once, and wait in it.

        Raises `IoProcessError` if the process cannot be started, or was started before.
        """
        if (state := self.life.state) is not State.NEW:
            raise IoProcessError(f"the I/O client cannot be started: it is {state.value}")
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
        self._wait(lambda: self._answers.ready is not None, time.monotonic() + timeout_s)
        ready = self._answers.ready
        if ready is not None and ready.serving:
            return ready
        reason = self.life.reason or f"the I/O process gave no answer within {timeout_s:g} s"
        self.close()
        if ready is None or ready.trouble is None:
            raise IoProcessError(reason)
        error = next(e for e, trouble in wire.TROUBLES.items() if trouble == ready.trouble)
        raise error(ready.message)

    def drain(self, timeout_s: float) -> int:
        """Give up fetches and wait up to `timeout_s` for uploads. Returns the uploads left.

        The next `poll` returns the jobs that ended meanwhile. Call only `poll` and `close`
        afterwards. If the worker is killed while it waits here, the process still uses `timeout_s`.
        """
        jobs, uploads = self._jobs, self._jobs.of(JobKind.UPLOAD)
        if jobs.any_outstanding:
            self._post(wire.Drain(timeout_s))
            deadline_s = time.monotonic() + timeout_s + _GRACE_S
            self._wait(lambda: self._answers.drained is not None, deadline_s)
        drained = self._answers.drained
        return len(uploads - jobs.uploaded()) if drained is None else drained.left

    def settle(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` until every job on memory has ended, then cancel the others. If
        one has not ended a second later, kill the process, which is replaced, and wait for its end.
        Nothing uses the slab afterwards until the next `submit`; `poll` returns the ends."""
        moves = partial(self._jobs.of, JobKind.FETCH, JobKind.UPLOAD)
        self._wait(lambda: not moves(), time.monotonic() + timeout_s)
        for job_id in moves():
            self.cancel(job_id)
        self._wait(lambda: not moves(), time.monotonic() + _CANCELLED_S)
        if self._up is not None and moves():
            reason = f"the I/O process has not ended its jobs within {timeout_s:g} s"
            self.life.failed(reason, self._clock())
        while self.life.state is State.DYING:
            self._bury()
            time.sleep(0.001)

    def close(self) -> None:
        """End the process, by force after 2 s. Idempotent. Nothing uses the slab afterwards.

        Jobs that `poll` has not returned yet are never returned.
        """
        if self._child is not None:
            self._child.end(_GRACE_S)
            self._child = None
        self.life.closed()
        self._jobs.forget()

    def _wait(self, done: Callable[[], bool], deadline_s: float) -> None:
        """Exchange messages until `done`, the deadline, or the end of the process."""
        while (child := self._up) is not None and not done():
            child.flush()
            if (left_s := deadline_s - time.monotonic()) <= 0:
                return
            is_dead = child.is_dead()  # checked first, or its last messages would be lost
            self._receive(child, min(left_s, CHECK_S))
            if is_dead:
                self.life.failed("", self._clock())
        while self.life.state is State.DYING and time.monotonic() < deadline_s:
            self._bury()
            time.sleep(0.001)

    # While the engine runs: nothing below blocks but `poll`.

    def submit(self, job: BucketJob) -> None:
        """Take a job; the next `flush` or `poll` sends it. The I/O process owns the job's part of
        the slab until the job has ended. Raises `ValueError` if a job with this id has not ended; a
        job that cannot be carried out ends as INVALID (`io.formats`)."""
        state = self.life.state
        why_down = "" if state is State.UP else f"the I/O process is {state.value}"
        if self._jobs.add(job, why_down):
            self._post(job)

    def cancel(self, job_id: int, *, if_waiting: bool = False) -> None:
        """Request that a job end soon; `if_waiting`: only if it has not begun. It ends as
        CANCELLED, or as it would have otherwise."""
        if self._jobs.has(job_id):
            self._post(wire.Cancel(job_id, if_waiting))

    def flush(self) -> None:
        """Send as much of the queue as the socket takes."""
        if (child := self._up) is not None:
            child.flush()

    def poll(self, linger_s: float = 0.0) -> list[JobEnd]:
        """Return the ends of jobs since the last call, and log failures. Call it every engine step.

        linger_s: longest wait for a message of the process while jobs are under way.
        """
        if not self.is_due:
            return []
        if (child := self._up) is not None:
            child.flush()
            self._receive(child, linger_s if self._jobs.any_outstanding else 0.0)
            self._look_after(child)
            self.flush()
        if self.life.state is State.DYING:
            self._bury()
        if self.life.is_due(State.DOWN, self._clock()):
            self._restart()
        return self._jobs.take_ends()

    @property
    def pid(self) -> int | None:
        """Id of the current process; None without one."""
        return None if self._child is None else self._child.pid

    def _post(self, message: wire.Down) -> None:
        """Queue a message for the process, if it is up."""
        if (child := self._up) is not None:
            child.post(message)

    @property
    def _up(self) -> Child | None:
        return self._child if self.life.state is State.UP else None

    @property
    def is_due(self) -> bool:
        """Whether `poll` has anything to do. Most steps need no system call."""
        return (
            (child := self._up) is None
            or self._answers.ready is None
            or len(self._jobs) > 0
            or child.has_unsent
            or not self._heartbeat.is_idle(self._clock())
        )

    def _receive(self, child: Child, wait_s: float = 0.0) -> None:
        try:
            for message in child.receive(wait_s):
                self._take(message)
        except wire.WireError as error:
            reason = f"the I/O process {child.pid} breaks the protocol: {error}"
            self.life.failed(reason, self._clock(), broke_protocol=True)
        if child.hung_up:
            # The process is probably exiting by itself, and may still print why.
            self.life.failed("", self._clock() + _GRACE_S)

    def _take(self, message: wire.Up) -> None:
        match message:
            case JobEnd():
                self._jobs.ended(message)
            case wire.Stats():
                self._count(message)
                self._answers.stats = message
                self._heartbeat.answered()
            case wire.Ready():
                self._answers.ready = message
                self._heartbeat.answered()
                if not message.serving:
                    self.life.failed(message.message, self._clock() + _GRACE_S)
            case wire.Drained():
                self._answers.drained = message

    def _count(self, stats: wire.Stats) -> None:
        counted = self._answers.stats.counters if self._answers.stats else {}
        for name, value in stats.counters.items():
            self.counters[name] += value - counted.get(name, 0)

    def _look_after(self, child: Child) -> None:
        now_s = self._clock()
        if self.life.state is not State.UP or (due := self._heartbeat.check(now_s)) is None:
            return
        if child.is_dead():
            # A process forked during the start may hold the other end of the stream open.
            self.life.failed("", now_s)
        elif due == "ping":
            child.post(wire.Ping())
        elif due == "hangs":
            self.life.failed(f"the I/O process {child.pid} does not answer", now_s)

    def _bury(self) -> None:
        """Kill the process that is DYING when that is due; once it is dead, end its jobs."""
        child, life = self._child, self.life
        if child is None:
            return
        if not child.is_dead():
            if life.is_due(State.DYING, self._clock()):
                child.kill()
            return
        ready = self._answers.ready
        is_refusal = ready is not None and not ready.serving
        crashed = life.broke_protocol or not (child.was_killed or is_refusal)
        life.died(child.last_words(), self._clock())
        child.end(0.0)
        self._child = None
        self._jobs.died(life.reason, crashed=crashed)

    def _restart(self) -> None:
        # The bucket was tried at the first start. An outage is no reason to stop now.
        config = dataclasses.replace(self._handshake.config, on_unavailable="serve")
        try:
            self._spawn(msgspec.structs.replace(self._handshake, config=config))
        except OSError:
            self.life.refused(self._clock())
        else:
            self.counters["io_restarts"] += 1

    def _spawn(self, handshake: wire.Handshake) -> None:
        self._child = self._make_child()
        now_s = self._clock()
        self.life.started(now_s)
        self._heartbeat, self._answers = Heartbeat(now_s), _Answers()
        self._child.post(handshake)
        self._child.flush()
