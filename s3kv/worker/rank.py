"""One rank's worker: carries out step plans and reports how their jobs ended.

It runs on the engine's thread of a worker process. `begin` and `save` block there for fences: on a
GPU until the copies have been launched, on a CPU until they have ended. `poll` blocks if the plan
marks the engine as idle; the methods with a timeout, and `give_up_loads`, block for the copies.
Device copies and the I/O process do the work; this joins them: a chunk copied to a slot is handed
to the I/O process for upload, and a job that cannot be carried out ends as failed. Its reports are
the scheduler's only information about this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from s3kv.device.copies import BlockCopies, SavedEnd
from s3kv.device.copy_jobs import CopyMark
from s3kv.io.client import IoClient
from s3kv.messages import BucketJob, JobEnd, JobKind, LoadJob, SaveJob, StepPlan, StepReport
from s3kv.types import Outcome, Tally

_GIVE_UP_S = 5.0


class RankWorker:
    """The worker of one rank. `copies` and `client` work on the same slab; `shutdown` closes both.

    block_bytes: size of one block of each KV-cache group on this rank. members: by the group in
    keys, the KV-cache groups whose blocks are in its objects; by default, that group. uploads:
    False if another rank holds the same KV, uploads it and checks its uses. Such jobs of this rank
    then end at once. clock: seconds, monotonic.
    """

    def __init__(
        self,
        *,
        copies: BlockCopies,
        client: IoClient,
        block_bytes: Mapping[int, int],
        uploads: bool = True,
        clock: Callable[[], float],
        members: Mapping[int, tuple[int, ...]] | None = None,
    ) -> None:
        self.counters = Tally()
        self._seconds: dict[str, list[float]] = {}
        self._clock, self._copies, self._client = clock, copies, client
        self._block_bytes, self._uploads = block_bytes, uploads
        self._members = members or {group: (group,) for group in block_bytes}
        self._copies_per_save = max(map(len, self._members.values()))
        """Most copies of a save, which has one per member of its object. Copy `i` of job `n` has
        the number `n * copies_per_save + i`."""
        self._saves: dict[int, SaveJob] = {}
        self._announced: dict[int, SaveJob] = {}
        """Saves of the current plan that have not begun."""
        self._begun: CopyMark | None = None
        """The mark of the step's beginning, if its plan has loads."""
        self._copied: dict[int, list[SavedEnd]] = {}
        """By save: the ends of its finished copies, while other copies of it are unfinished."""
        self._jobs: set[int] = set()
        self._report = StepReport()
        self._loading: dict[str, tuple[int, float]] = {}
        """By request: the bytes to copy, and the time of the order."""
        self._loaded, self._failed = set[str](), set[str]()
        self._suspended = False

    def begin(self, plan: StepPlan) -> None:
        """Fence blocks, and start the jobs of the I/O process. Called before the step writes to
        blocks. Saves of the previous plan that the engine skipped end as failed. If the engine
        speculates, it skips all saves on ranks before the last pipeline stage."""
        if self._announced:
            self.refuse([*self._announced.values()])
        self._announced = {job.job_id: job for job in plan.saves}
        self._report.number = plan.number
        if plan.fences:
            self._fence(plan.fences)
        self._begun = self._copies.mark() if plan.loads else None
        for job in plan.jobs:
            self._start(job)
        for job_id in plan.cancels:
            self._client.cancel(job_id)
        for job_id in plan.withdrawals:
            self._client.cancel(job_id, if_waiting=True)
        self._client.flush()

    def load(self, jobs: Iterable[LoadJob], *, from_now: bool = False) -> None:
        """Copy slots to blocks, after what was launched before `begin`. The step that orders a load
        does not use its blocks, so the load runs beside the forward. from_now: copy after what has
        been launched by now, because the step may have written to the blocks since `begin`."""
        mark = self._copies.mark() if from_now else self._begun
        for job in jobs:
            nbytes = sum(self._block_bytes[p.group] * len(p.block_ids) for p in job.parts)
            self._loading[job.request_id] = nbytes, self._clock()
            if self._suspended:
                self._loaded_or_failed(job.request_id, False)
            else:
                self._copies.load(job.request_id, job.parts, mark)

    def save(self, jobs: Sequence[SaveJob], *, read_first: bool = False) -> None:
        """Copy blocks to slots. Called after the forward that fills the blocks has been launched.
        Saves that `begin` has not announced, or has already given up, are skipped. read_first:
        fence the blocks now, so that the engine's next work begins after they have been read."""
        if self._suspended:
            self.refuse(jobs)
            return
        jobs = [job for job in jobs if self._announced.pop(job.job_id, None) is not None]
        mark = self._copies.mark() if jobs else None
        for job in jobs:
            self._saves[job.job_id] = job
            first, members = job.job_id * self._copies_per_save, self._members[job.key.group]
            blocks = len(job.block_ids) // len(members)
            for number, member in enumerate(members):
                ids = job.block_ids[number * blocks : (number + 1) * blocks]
                self._copies.save(first + number, member, job.slot, ids, mark)
        if read_first:
            self._fence(job.job_id for job in jobs)

    def refuse(self, jobs: Iterable[SaveJob]) -> None:
        """End saves as failed, because their blocks do not hold the content of their keys."""
        for job in jobs:
            if self._announced.pop(job.job_id, None) is not None:
                self._saved(job, False, 0.0)

    def wait_launched(self, timeout_s: float) -> bool:
        """Block until every copy ordered so far has been launched. Returns False if time runs out
        first. For an engine that may unmap the blocks' memory once the device is idle."""
        return self._copies.wait_started(timeout_s)

    def suspend(self, timeout_s: float) -> bool:
        """Finish the copies, because the blocks' memory will be unmapped; copies ordered before
        `resume` end as failed. Returns False if time runs out first. Idempotent."""
        self._suspended = True
        return self._copies.wait_all(timeout_s)

    def resume(self) -> None:
        """Copy again: the blocks' memory is back, at the same addresses. Idempotent."""
        self._suspended = False

    def poll(self, linger_s: float = 0.0) -> None:
        """Collect the ends since the last call; `take_report` and `take_loaded` hand them on.
        linger_s: how long to wait for a load to end or, if no copy is under way, for a fetch or an
        upload."""
        if self._loading or self._saves:
            if linger_s and self._loading:
                self._copies.wait_load(linger_s)
            ends = self._copies.poll()
            for end in ends.saved:
                self._copy_ended(end)
            for request_id, ok in ends.loaded:
                self._loaded_or_failed(request_id, ok)
        for done in self._client.poll(0.0 if self._loading or self._saves else linger_s):
            self._jobs.remove(done.job_id)
            self._end(done)
            if done.reason:
                self.counters[f"{done.kind.value}_corrupt_{done.reason}"] += 1

    def take_report(self) -> StepReport | None:
        """The ends since the last call, and the number of the plan begun since, if any."""
        if not self._report.ends and self._report.number is None:
            return None
        report, self._report = self._report, StepReport()
        return report

    def take_seconds(self) -> dict[str, list[float]]:
        """Durations of the jobs that have succeeded since the last call, by metric
        ("fetch_seconds")."""
        taken, self._seconds = self._seconds, {}
        return taken

    def take_loaded(self) -> tuple[set[str], set[str]]:
        """Requests whose load has ended, and those of them whose load failed."""
        loaded, self._loaded = self._loaded, set()
        failed, self._failed = self._failed, set()
        return loaded, failed

    @property
    def is_quiet(self) -> bool:
        """Whether `poll` and `take_loaded` have nothing to do, as in most steps."""
        busy = self._loading or self._saves or self._jobs or self._loaded
        return not busy and not self._client.is_due

    def give_up_loads(self) -> set[str]:
        """Wait for the copies, and return the requests whose loads were not reported as ended. Used
        when this object can no longer be trusted. Gives up waiting after `_GIVE_UP_S`."""
        self._copies.wait_all(_GIVE_UP_S)
        return set(self._loading) | self._loaded

    def shutdown(self, drain_timeout_s: float) -> int:
        """Finish copies and uploads within `drain_timeout_s`, then close. Returns the number of
        uploads left."""
        deadline_s = self._clock() + drain_timeout_s
        self._copies.wait_all(drain_timeout_s)
        self.poll()
        left = self._client.drain(max(0.0, deadline_s - self._clock()))
        self._client.close()
        self._copies.close()
        return left

    @property
    def busy(self) -> int:
        """Jobs not ended yet. For tests."""
        return len(self._saves) + len(self._jobs)

    def _start(self, job: BucketJob) -> None:
        if self._uploads or job.kind is JobKind.FETCH:
            self._jobs.add(job.job_id)
            self._client.submit(job)
        else:
            self._report.add(JobEnd(job.job_id, job.kind, Outcome.OK))

    def _fence(self, job_ids: Iterable[int]) -> None:
        per_save = self._copies_per_save
        self._copies.fence(
            copy for job in job_ids for copy in range(job * per_save, (job + 1) * per_save)
        )

    def _copy_ended(self, end: SavedEnd) -> None:
        """Take in the end of a copy. The save ends with the last of its copies."""
        job_id = end.job_id // self._copies_per_save
        job, ends = self._saves[job_id], self._copied.setdefault(job_id, [])
        ends.append(end)
        if len(ends) == len(self._members[job.key.group]):
            del self._saves[job_id], self._copied[job_id]
            self._saved(job, all(e.ok for e in ends), max(e.seconds for e in ends))

    def _loaded_or_failed(self, request_id: str, ok: bool) -> None:
        nbytes, since_s = self._loading.pop(request_id)
        self._loaded.add(request_id)
        if not ok:
            self._failed.add(request_id)
            return
        self.counters["load_ok"] += 1
        self.counters["load_bytes"] += nbytes
        self._seconds.setdefault("load_seconds", []).append(self._clock() - since_s)

    def _saved(self, job: SaveJob, ok: bool, seconds: float) -> None:
        outcome = Outcome.OK if ok else Outcome.FAILED
        members = self._members[job.key.group]
        block_bytes = sum(self._block_bytes[member] for member in members)
        nbytes = block_bytes * len(job.block_ids) // len(members)
        self._end(JobEnd(job.job_id, JobKind.SAVE, outcome, nbytes, seconds))
        if ok:
            self._start(BucketJob(job.job_id, JobKind.UPLOAD, job.key, job.slot))
        else:
            self._end(JobEnd(job.job_id, JobKind.UPLOAD, Outcome.CANCELLED))

    def _end(self, end: JobEnd) -> None:
        kind = end.kind.value
        self.counters[f"{kind}_{end.outcome.name.lower()}"] += 1
        if end.outcome.is_success and end.kind is not JobKind.USE:
            self.counters[f"{kind}_bytes"] += end.nbytes
            self._seconds.setdefault(f"{kind}_seconds", []).append(end.seconds)
        self._report.add(end)
