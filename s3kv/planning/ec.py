"""Planner of encoder outputs: decides which are fetched, awaited, promised, loaded and saved.

The life of a request, from `meet` to `finished`:

    It requests each item that it needs, unless the engine or host memory holds the item, and again
    only if the engine has taken the item and dropped it. It waits as long as `deadline.decide`
    allows. It leases (pins) resident items until the engine takes them or the request ends.

These rules make it safe:
- `promise` returns only items in host memory, and pins each until every step that could load it
  has ended (`steps_inflight`). No promised item can therefore be evicted.
- An item's key covers its rows and its request's salt, so one identifier may name several items.
- The ledger's rules for fetches apply.

Scheduler process, one thread. Times are arguments (seconds, monotonic).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from s3kv.host.table import Entry
from s3kv.messages import BucketJob, ItemLoad, ItemPlan, ItemReport, ItemSave, JobEnd
from s3kv.objects.item_format import MAX_ITEM_BYTES
from s3kv.planning.deadline import Forecast, Queue, Wait, WaitFacts, keep_waiting
from s3kv.planning.items import EncodingPace, ItemSizes, Wanted
from s3kv.planning.job import Job
from s3kv.planning.ledger import ChunkState, Ledger
from s3kv.planning.pace import FetchTime
from s3kv.types import ItemShape


@dataclass(frozen=True, slots=True, kw_only=True)
class ECPlannerSettings:
    """Planner settings. dtype: safetensors name of all items' dtype. width: width of the model's
    embeddings. steps_inflight: most engine steps that may run at once."""

    dtype: str
    width: int
    max_wait_s: float
    steps_inflight: int
    may_load: bool
    may_save: bool
    recompute_gate: bool = True
    max_item_bytes: int = MAX_ITEM_BYTES


@dataclass(slots=True)
class _ItemRequest:
    """Items of a request. named: all, by identifier; None for an item that is not cached. leases:
    pinned items, by identifier. pending: the fetches that it waits for. wait: its wait for them,
    whose deadline reflects the planner's first `as_of` events (`_news`)."""

    named: set[tuple[str, Wanted | None]] = field(default_factory=set)
    asked: dict[str, Wanted] = field(default_factory=dict)
    pending: dict[str, Job] = field(default_factory=dict)
    leases: dict[str, Entry] = field(default_factory=dict)
    wait: Wait = field(default_factory=Wait)
    as_of: int = -1


class ECPlanner:
    """Planner of one engine's encoder outputs."""

    def __init__(self, ledger: Ledger, pace: EncodingPace, settings: ECPlannerSettings) -> None:
        self.ledger = ledger
        self.pace = pace
        self.counters = ledger.counters
        self._settings = settings
        most = min(settings.max_item_bytes, ledger.table.largest_bytes)
        self._sizes = ItemSizes(settings.dtype, settings.width, most)
        self._requests: dict[str, _ItemRequest] = {}
        self._names: dict[str, Counter[Wanted | None]] = {}
        """For each identifier, the items that it names in live requests, with request counts."""
        self._late: set[int] = set()
        """Fetches that continue although a request has given up its wait for them."""
        self._on_device: set[str] = set()
        self._promises: dict[str, tuple[Entry, ItemLoad]] = {}
        self._loads: dict[str, ItemLoad] = {}
        self._saves: dict[str, ItemSave] = {}
        self._loading: deque[tuple[Entry, ...]] = deque()
        self._fetches: list[BucketJob] = []
        self._cancels: list[int] = []
        self._bytes_until: dict[int, int] = {}
        """Cumulative expected bytes of the fetches under way, by job id; empty if not known."""
        self._news = 0
        """Number of events so far that may change how long requests should wait."""

    def meet(self, request_id: str, named: Iterable[tuple[str, Wanted | None]]) -> None:
        """Record a request's items, before its first `ensure` and whenever it has gained more."""
        request = self._requests.setdefault(request_id, _ItemRequest())
        for identifier, item in set(named) - request.named:
            request.named.add((identifier, item))
            self._names.setdefault(identifier, Counter())[item] += 1

    def ensure(self, request_id: str, wanted: Sequence[Wanted], now_s: float) -> bool:
        """Whether the request may be scheduled. False: an item is in flight; call again.

        wanted: the cacheable items that the rest of the request still needs.
        """
        if not self._settings.may_load:
            return True
        request = self._requests[request_id]
        for item in wanted:
            if item.identifier not in request.asked:
                self._ask(request_id, request, item, now_s)
        return not self.waits(request_id, now_s)

    def waits(self, request_id: str, now_s: float) -> bool:
        """Whether `ensure` would return False again for a request that needs the same items."""
        request = self._requests.get(request_id)
        if request is None or not request.pending:
            return False
        if request.as_of != self._news:
            request.wait.wake()
            request.as_of = self._news
        if now_s < request.wait.until_s:
            return True

        def gave_up(waited_s: float) -> None:
            self._times(request).gave_up(waited_s)
            self._news += 1

        if keep_waiting(self._facts(request, now_s), self.counters, gave_up):
            return True
        for identifier, job in request.pending.items():
            job.waiters.remove((request_id, identifier))
            self._late.add(job.job_id)
        request.pending.clear()
        return False

    def _ask(self, request_id: str, request: _ItemRequest, wanted: Wanted, now_s: float) -> None:
        request.asked[wanted.identifier] = wanted
        self.ledger.unsaved.hit(wanted.key)
        self.ledger.index.use(wanted.key, now_s)
        if wanted.identifier in self._on_device or len(self._names[wanted.identifier]) > 1:
            return  # nothing to load, or nothing that could be promised
        held = self.ledger.table.lookup(wanted.key)
        if held is not None and held.is_resident:
            self._lease(request, wanted.identifier, held)
            return
        job = self._fetch(wanted, now_s)
        if job is None:
            return
        if not request.pending:
            request.wait.start_over()
        request.wait.begin(now_s, 0)
        request.wait.asked_s = now_s
        request.wait.wanted += wanted.rows
        request.pending[wanted.identifier] = job
        job.waiters.append((request_id, wanted.identifier))

    def _lease(self, request: _ItemRequest, identifier: str, item: Entry) -> None:
        self._pin(item)
        request.leases[identifier] = item

    def _pin(self, item: Entry) -> None:
        self.ledger.table.pin(item)
        self.ledger.table.touch_chain([item])

    def _fetch(self, wanted: Wanted, now_s: float) -> Job | None:
        """The fetch of a non-resident item, joined or planned now; None if it is not fetched."""
        ledger = self.ledger
        if ledger.state(wanted.key) is ChunkState.FETCHING:
            return ledger.fetch_job(wanted.key)
        room = self._sizes.room(wanted)
        if room is None:
            self.counters["items_too_large"] += 1
            return None
        if ledger.refusal(wanted.key, now_s):
            return None
        if (job := ledger.plan_fetch(wanted.key, now_s, room)) is not None:
            job.about = wanted
            if until := self._bytes_until:
                until[job.job_id] = next(reversed(until.values())) + self._sizes.expected(wanted)
            self._fetches.append(job.for_bucket(ItemShape(wanted.rows, job.entry.nbytes)))
        return job

    def _facts(self, request: _ItemRequest, now_s: float) -> WaitFacts:
        if not self._bytes_until:
            fetches = [job for job in self.ledger.jobs if job.is_fetch]
            sums = accumulate(self._sizes.expected(job.about) for job in fetches)
            self._bytes_until = dict(zip([job.job_id for job in fetches], sums, strict=True))
        bytes_ahead = max(self._bytes_until[job.job_id] for job in request.pending.values())
        fetch = self._times(request)
        return WaitFacts(
            now_s=now_s,
            wait=request.wait,
            missing=sum(request.asked[identifier].rows for identifier in request.pending),
            unproven=0,
            progress_s=request.wait.arrived_s,
            queue=Queue(),
            compute_s=self.pace.encode_s(1),
            forecast=Forecast(fetch.at(bytes_ahead), fetch.measured(bytes_ahead)),
            max_wait_s=self._settings.max_wait_s,
            gate=self._settings.recompute_gate,
        )

    def _times(self, request: _ItemRequest) -> FetchTime:
        return self.pace.of(near=all(job.near for job in request.pending.values()))

    def finished(self, request_id: str) -> None:
        """Forget a request that has ended or was aborted. Cancels fetches without other waiters,
        unless they are late."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        for identifier, job in request.pending.items():
            job.waiters.remove((request_id, identifier))
            if not job.waiters and job.job_id not in self._late:
                self._cancels.append(job.job_id)
        for item in request.leases.values():
            self.ledger.table.unpin(item)
        for identifier, named in request.named:
            self._names[identifier] -= Counter([named])
            if not self._names[identifier]:
                del self._names[identifier]

    def reset(self) -> None:
        """Forget all items, between passes. Live requests get no more; later ones use new keys."""
        self.ledger.index.forget()
        self._on_device.clear()
        for request_id, request in [*self._requests.items()]:
            self.finished(request_id)
            self.meet(request_id, ((identifier, None) for identifier, _ in request.named))

    def promise(self, identifier: str) -> ItemLoad | None:
        """The load to make in this pass instead of encoding the item; None: encode it."""
        meanings = [*self._names.get(identifier, ())]
        if len(meanings) != 1 or (wanted := meanings[0]) is None:
            return None
        if identifier in self._promises:
            return self._promises[identifier][1]
        item = self.ledger.table.lookup(wanted.key)
        if item is None or not item.is_resident:
            return None
        width = self._sizes.width(wanted, item.nbytes)
        self._pin(item)
        load = ItemLoad(identifier, *item.span, wanted.rows, width)
        self._promises[identifier] = (item, load)
        return load

    def allocated(self, request_id: str, wanted: Wanted, now_s: float, *, saves: bool) -> None:
        """Record that the engine has made room for an item in its own cache. It now loads the item
        if it was promised in this pass, else encodes it. saves: an encoded item may be saved."""
        identifier = wanted.identifier
        self._on_device.add(identifier)
        self._saves.pop(identifier, None)
        request = self._requests.get(request_id)
        if request is not None:
            request.asked.pop(identifier, None)
            if (lease := request.leases.pop(identifier, None)) is not None:
                self.ledger.table.unpin(lease)
        promise = self._promises.get(identifier)
        if promise is not None and promise[0].key == wanted.key:
            if identifier not in self._loads:
                rows, tier = wanted.rows, promise[0].use()
                self.counters.update({"hits": 1, "hit_rows": rows, f"hit_rows_{tier}": rows})
            self._loads[identifier] = promise[1]
        elif saves and self._settings.may_save:
            self._save(wanted, now_s)

    def _save(self, wanted: Wanted, now_s: float) -> None:
        state, verdict = self.ledger.state(wanted.key), self.ledger.index.verdict
        is_known = state is ChunkState.RESIDENT or verdict(wanted.key, now_s)
        # An engine that does not load never detects deletions, so an old verdict does not count.
        if is_known and state is not ChunkState.FETCHING:
            return
        self.counters["saves"] += 1
        self._saves[wanted.identifier] = ItemSave(wanted.identifier, wanted.key, wanted.rows)

    def plan(self, freed: Sequence[str]) -> ItemPlan:
        """End the pass. freed: identifiers that the engine has dropped from its own cache."""
        self._on_device.difference_update(freed)
        loading = []
        for identifier, (item, _) in self._promises.items():
            if identifier in self._loads:
                loading.append(item)
            else:
                self.ledger.table.unpin(item)
        self._loading.append(tuple(loading))
        while len(self._loading) > self._settings.steps_inflight:
            for item in self._loading.popleft():
                self.ledger.table.unpin(item)
        plan = ItemPlan(tuple(self._loads.values()), tuple(self._saves.values()))
        self._promises.clear()
        self._loads.clear()
        self._saves.clear()
        return plan

    def take_fetches(self) -> list[BucketJob]:
        """Take the fetches planned since the last call."""
        fetches, self._fetches = self._fetches, []
        return fetches

    def take_cancels(self) -> list[int]:
        """Take the fetches that have no waiter left. Each holds its place until it has ended."""
        cancels, self._cancels = self._cancels, []
        return cancels

    def on_end(self, end: JobEnd, now_s: float) -> None:
        """Process the end of a job. Nothing writes to a fetch's place after its end."""
        job = self.ledger.on_end(end, now_s)
        assert job is not None, "nobody else reports it"
        if not job.is_fetch:
            return
        self._news += 1
        self._bytes_until.clear()
        self._late.discard(job.job_id)
        if end.outcome.is_success:
            self._sizes.arrived(job.about, end.nbytes)
            self.counters["fetch_bytes"] += end.nbytes
        fetch = self.pace.of(near=not job.asked_bucket)
        fetch.ended(end.outcome, end.nbytes, end.seconds, end.source)
        for request_id, identifier in job.waiters:
            request = self._requests[request_id]
            del request.pending[identifier]
            request.wait.arrived(now_s)
            if end.outcome.is_success:
                self._lease(request, identifier, job.entry)

    def on_report(self, report: ItemReport, now_s: float) -> None:
        """Process a report of the workers."""
        self.counters.update(report.counters)
        if report.encoded_rows:
            self.pace.encoded(report.encoded_rows, report.encode_seconds)
            self._news += 1
        for key, fresh_s in report.uploaded.items():
            self.ledger.index.note_present(key, now_s + fresh_s)
