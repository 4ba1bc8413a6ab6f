"""What becomes of encoder outputs: which are fetched, waited for, promised, loaded and saved.

The life of an item in here:

    absent ──a request needs it──▶ FETCHING ──arrived and verified──▶ RESIDENT ──evicted──▶ absent
                                      └──missing, damaged, failed──▶ absent

and of a request, from its first `ensure` to `finished`:

    it asks once for every item it needs that neither the engine nor host memory holds; it waits
    while `pace.wait_until_s` says so; items that are there are leased to it (pinned) until it
    has been given them or ends. After that it never waits again for the same item.

What makes it safe:
- `promise` is given for an item in host memory only, and pins it until no step that could load it
  can still be running (`steps_inflight`), so nothing that was promised can be evicted.
- An item's key covers the number of rows, so that one identifier used for two sizes is two items.
- One fetch per item, however many requests wait for it.

Scheduler process, one thread. Time comes in as an argument (seconds, monotonic).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from s3kv.host.items import Item, ItemTable
from s3kv.messages import ItemLoad, ItemPlan, ItemReport, ItemSave
from s3kv.planning.breaker import Breaker
from s3kv.planning.encoding import EncodingPace
from s3kv.planning.index import BucketIndex
from s3kv.planning.items import ItemSizes, Wanted
from s3kv.planning.pace import wait_until_s
from s3kv.types import ChunkKey, ItemShape, Outcome


@dataclass(frozen=True, slots=True)
class ECPlannerSettings:
    """dtype: of all items, as safetensors names it. width: of the model's embeddings.
    steps_inflight: engine steps that may be under way at once, at most."""

    dtype: str
    width: int
    max_wait_s: float
    recompute_gate: bool
    max_item_bytes: int
    steps_inflight: int
    may_load: bool
    may_save: bool


@dataclass(frozen=True, slots=True)
class ItemFetch:
    """Fill the slab from `offset` with the item: an order for the I/O process."""

    job_id: int
    key: ChunkKey
    offset: int
    shape: ItemShape


@dataclass(slots=True, eq=False)
class _Flight:
    """A fetch under way. late: somebody gave up waiting for it, and it is to land all the same."""

    job_id: int
    item: Item
    wanted: Wanted
    waiters: set[str] = field(default_factory=set)
    late: bool = False


@dataclass(slots=True)
class _Request:
    """leases: items it holds pinned, by identifier. pending: what it waits for. until_s: how long,
    as of the planner's news `as_of`.
    """

    asked: dict[str, Wanted] = field(default_factory=dict)
    pending: dict[ChunkKey, _Flight] = field(default_factory=dict)
    leases: dict[str, Item] = field(default_factory=dict)
    hoped_rows: int = 0
    started_s: float = 0.0
    asked_s: float = 0.0
    arrival_s: float = 0.0
    until_s: float = 0.0
    as_of: int = -1


class ECPlanner:
    """widths: of the encoder's output, by modality, as far as they are known already."""

    def __init__(
        self,
        table: ItemTable,
        index: BucketIndex,
        breaker: Breaker,
        pace: EncodingPace,
        settings: ECPlannerSettings,
        widths: dict[str, int] | None = None,
    ) -> None:
        self.table = table
        self.index = index
        self.breaker = breaker
        self.pace = pace
        self.counters: Counter[str] = Counter()
        self._settings = settings
        most = min(settings.max_item_bytes, table.largest_bytes)
        self._sizes = ItemSizes(settings.dtype, settings.width, most, widths)
        self._requests: dict[str, _Request] = {}
        self._names: dict[str, dict[Wanted, int]] = {}
        """By identifier: what the living requests mean by it, and how many of them."""
        self._flights: dict[ChunkKey, _Flight] = {}
        self._jobs: dict[int, _Flight] = {}
        self._next_job_id = 1
        self._on_device: set[str] = set()
        self._promises: dict[str, tuple[Item, ItemLoad]] = {}
        self._loads: dict[str, ItemLoad] = {}
        self._saves: dict[str, ItemSave] = {}
        self._loading: deque[tuple[Item, ...]] = deque()
        self._fetch_orders: list[ItemFetch] = []
        self._cancels: list[int] = []
        self._news = 0
        """Counts what may change how long it is right to wait."""

    @property
    def fetches_inflight(self) -> int:
        return len(self._jobs)

    # --- a request's view ------------------------------------------------------------------

    def ensure(self, request_id: str, wanted: Sequence[Wanted], now_s: float) -> bool:
        """Whether the request may be scheduled; False: ask again, something is on its way.

        wanted: the cacheable items that what is left to compute of the request still needs.
        """
        if not self._settings.may_load:
            return True
        request = self._requests.get(request_id)
        if request is None:
            if not wanted:
                return True
            request = self._requests[request_id] = _Request()
        for item in wanted:
            if item.identifier not in request.asked:
                self._ask(request_id, request, item, now_s)
        return not self.waits(request_id, now_s)

    def waits(self, request_id: str, now_s: float) -> bool:
        """Whether `ensure` would say False again, for a request that needs what it needed then."""
        request = self._requests.get(request_id)
        if request is None or not request.pending:
            return False
        if request.as_of != self._news:
            request.until_s = self._until_s(request, now_s)
            request.as_of = self._news
        if now_s < request.until_s:
            return True
        self._stop_waiting(request, request_id, now_s)
        return False

    def _ask(self, request_id: str, request: _Request, wanted: Wanted, now_s: float) -> None:
        request.asked[wanted.identifier] = wanted
        meanings = self._names.setdefault(wanted.identifier, {})
        meanings[wanted] = meanings.get(wanted, 0) + 1
        if wanted.identifier in self._on_device:
            return
        held = self.table.lookup(wanted.key)
        if held is not None and held.resident:
            self._lease(request, wanted.identifier, held)
            return
        flight = self._flights.get(wanted.key) or self._fetch(wanted, now_s)
        if flight is None:
            return
        if not request.pending:
            request.started_s = request.arrival_s = now_s
            request.hoped_rows = 0
        request.asked_s = now_s
        request.hoped_rows += wanted.rows
        request.pending[wanted.key] = flight
        request.as_of = -1
        flight.waiters.add(request_id)

    def _lease(self, request: _Request, identifier: str, item: Item) -> None:
        self.table.pin(item)
        request.leases[identifier] = item

    def _fetch(self, wanted: Wanted, now_s: float) -> _Flight | None:
        if self.index.is_absent(wanted.key, now_s):
            self.counters["fetches_spared"] += 1
            return None
        room = self._sizes.room(wanted)
        if room is None:
            self.counters["items_too_large"] += 1
            return None
        if not self.breaker.allows(now_s):
            self.counters["fetches_refused_by_breaker"] += 1
            return None
        item = self.table.reserve(wanted.key, room)
        if item is None:
            self.counters["fetches_without_room"] += 1
            return None
        self.counters["fetches"] += 1
        flight = _Flight(self._next_job_id, item, wanted)
        self._next_job_id += 1
        self._flights[wanted.key] = self._jobs[flight.job_id] = flight
        shape = ItemShape(wanted.rows, room)
        self._fetch_orders.append(ItemFetch(flight.job_id, wanted.key, item.span.offset, shape))
        return flight

    def _until_s(self, request: _Request, now_s: float) -> float:
        last = missing_rows = bytes_ahead = 0
        for flight in request.pending.values():
            last = max(last, flight.job_id)
            missing_rows += flight.wanted.rows
        for job_id, flight in self._jobs.items():
            if job_id <= last:
                bytes_ahead += self._sizes.expected(flight.wanted)
        return wait_until_s(
            now_s=now_s,
            started_s=request.started_s,
            asked_s=request.asked_s,
            arrival_s=request.arrival_s,
            expected_s=self.pace.fetch_s(bytes_ahead),
            patience_s=self.pace.patience_s(bytes_ahead),
            missing_compute_s=self.pace.encode_s(missing_rows),
            wanted_compute_s=self.pace.encode_s(request.hoped_rows),
            max_wait_s=self._settings.max_wait_s,
            gate=self._settings.recompute_gate,
        )

    def _stop_waiting(self, request: _Request, request_id: str, now_s: float) -> None:
        self.counters["deadline_cuts"] += 1
        if request.arrival_s < now_s:
            self.pace.gave_up(now_s - request.arrival_s)
            self._news += 1
        for flight in request.pending.values():
            flight.waiters.discard(request_id)
            flight.late = True
        request.pending.clear()

    def finished(self, request_id: str) -> None:
        """The request has ended, or was aborted. What nobody waits for any more is given up."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        for flight in request.pending.values():
            flight.waiters.discard(request_id)
            if not flight.waiters and not flight.late:
                self._cancels.append(flight.job_id)
        for item in request.leases.values():
            self.table.unpin(item)
        for identifier, wanted in request.asked.items():
            meanings = self._names[identifier]
            meanings[wanted] -= 1
            if not meanings[wanted]:
                del meanings[wanted]
            if not meanings:
                del self._names[identifier]

    # --- a scheduling pass -----------------------------------------------------------------

    def promise(self, identifier: str) -> ItemLoad | None:
        """What the engine may load in this pass instead of encoding the item; None: it encodes."""
        if identifier in self._promises:
            return self._promises[identifier][1]
        meanings = self._names.get(identifier)
        if meanings is None or len(meanings) != 1:
            return None
        (wanted,) = meanings
        item = self.table.lookup(wanted.key)
        if item is None or not item.resident:
            return None
        width = self._sizes.width(wanted, item.nbytes)
        self.table.pin(item)
        span = item.span
        load = ItemLoad(identifier, span.offset, span.nbytes, wanted.rows, width)
        self._promises[identifier] = (item, load)
        return load

    def allocated(self, request_id: str, wanted: Wanted) -> None:
        """The engine has made room for the item in its own cache: it loads it if that was
        promised in this pass, and encodes it otherwise.
        """
        identifier = wanted.identifier
        self._on_device.add(identifier)
        request = self._requests.get(request_id)
        lease = request.leases.pop(identifier, None) if request is not None else None
        if lease is not None:
            self.table.unpin(lease)
        promise = self._promises.get(identifier)
        if promise is not None:
            if identifier not in self._loads:
                tier = promise[0].use()
                self.counters["hits"] += 1
                self.counters.update({"hit_rows": wanted.rows, f"hit_rows_{tier}": wanted.rows})
            self._loads[identifier] = promise[1]
        elif self._settings.may_save:
            self._save(wanted)

    def _save(self, wanted: Wanted) -> None:
        known = self.index.is_present(wanted.key) or self.table.lookup(wanted.key) is not None
        if known and wanted.key not in self._flights:
            return
        self.counters["saves"] += 1
        self._saves[wanted.identifier] = ItemSave(wanted.identifier, wanted.key, wanted.rows)

    def plan(self, freed: Iterable[str]) -> ItemPlan:
        """End of the pass. freed: identifiers the engine has dropped from its own cache."""
        self._on_device.difference_update(freed)
        loading = []
        for identifier, (item, _) in self._promises.items():
            if identifier in self._loads:
                loading.append(item)
            else:
                self.table.unpin(item)
        self._loading.append(tuple(loading))
        while len(self._loading) > self._settings.steps_inflight:
            for item in self._loading.popleft():
                self.table.unpin(item)
        plan = ItemPlan(tuple(self._loads.values()), tuple(self._saves.values()))
        self._promises.clear()
        self._loads.clear()
        self._saves.clear()
        return plan

    # --- the bucket ------------------------------------------------------------------------

    def take_fetches(self) -> list[ItemFetch]:
        orders, self._fetch_orders = self._fetch_orders, []
        return orders

    def take_cancels(self) -> list[int]:
        """Fetches nobody waits for any more. They still end, and only their end frees the place."""
        cancels, self._cancels = self._cancels, []
        return cancels

    def ended(
        self, job_id: int, outcome: Outcome, nbytes: int, seconds: float, now_s: float
    ) -> None:
        """A fetch has ended and nothing writes to its place any more."""
        self._news += 1
        flight = self._jobs.pop(job_id)
        wanted, item = flight.wanted, flight.item
        del self._flights[wanted.key]
        self.counters[f"fetch_{outcome.name.lower()}"] += 1
        self.breaker.saw(outcome, now_s)
        if outcome.is_success:
            self._arrived(flight, nbytes, seconds)
        else:
            self.table.abandon(item)
            if outcome in (Outcome.MISSING, Outcome.CORRUPT):
                self.index.note_absent(wanted.key, now_s)
        for request_id in flight.waiters:
            request = self._requests[request_id]
            del request.pending[wanted.key]
            request.arrival_s = now_s
            if outcome.is_success:
                self._lease(request, wanted.identifier, item)

    def _arrived(self, flight: _Flight, nbytes: int, seconds: float) -> None:
        wanted = flight.wanted
        self._sizes.arrived(wanted, nbytes)
        self.table.commit(flight.item, nbytes)
        self.index.note_present(wanted.key)
        self.counters["fetch_bytes"] += nbytes
        self.pace.fetched(nbytes, seconds)

    def on_report(self, report: ItemReport) -> None:
        """What the workers have to tell."""
        self.counters.update(report.counters)
        if report.encoded_rows:
            self.pace.encoded(report.encoded_rows, report.encode_seconds)
            self._news += 1
        for key in report.uploaded:
            self.index.note_present(key)

    def check(self) -> None:
        """Re-derive what is derived and raise AssertionError where it differs. For tests."""
        self.table.check()
        pins: Counter[ChunkKey] = Counter()
        for request_id, request in self._requests.items():
            pins.update(item.key for item in request.leases.values())
            for key, flight in request.pending.items():
                assert self._flights[key] is flight
                assert request_id in flight.waiters
        pins.update(item.key for item, _ in self._promises.values())
        pins.update(item.key for items in self._loading for item in items)
        assert pins == Counter({k: i.pins for k, i in self.table.items() if i.pins})
        assert {f.wanted.key for f in self._jobs.values()} == set(self._flights)
        filling = {key for key, item in self.table.items() if not item.resident}
        assert filling == set(self._flights)
