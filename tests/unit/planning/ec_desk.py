"""A planner of encoder outputs with a bucket and a clock of its own, told what to answer."""

from __future__ import annotations

from typing import Any

from lab.books import check
from s3kv.host.room import Extents
from s3kv.host.table import Table
from s3kv.messages import BucketJob, ItemPlan, JobEnd, JobKind
from s3kv.objects.item_format import object_bytes
from s3kv.planning.breaker import Breaker
from s3kv.planning.ec import ECPlanner, ECPlannerSettings
from s3kv.planning.index import BucketIndex
from s3kv.planning.items import EncodingPace, Wanted
from s3kv.planning.ledger import Ledger
from s3kv.types import ChunkKey, Outcome

WIDTH = 64
MIB = 2**20


def wanted(identifier: str, rows: int = 100) -> Wanted:
    key = ChunkKey(0, f"{identifier}/{rows}".encode().ljust(32, b"."))
    return Wanted(identifier, key, rows, "image")


def nbytes(item: Wanted) -> int:
    return object_bytes("BF16", item.rows, WIDTH)


class Desk:
    """`bucket` holds keys. Orders wait in `orders` until `answer`."""

    def __init__(
        self, *, slab_bytes: int = 4 * MIB, has_disk: bool = False, **settings: Any
    ) -> None:
        defaults: dict[str, Any] = {
            "dtype": "BF16",
            "width": WIDTH,
            "max_wait_s": 10.0,
            "recompute_gate": True,
            "max_item_bytes": 2 * MIB,
            "steps_inflight": 2,
            "may_load": True,
            "may_save": True,
        }
        ledger = Ledger(
            Table(Extents.of(slab_bytes)),
            BucketIndex(capacity=1000, miss_ttl_s=20.0),
            Breaker(threshold=3, has_disk=has_disk),
            world_size=1,
        )
        self.planner = ECPlanner(
            ledger,
            EncodingPace(encode_rows_per_s=100.0),
            ECPlannerSettings(**(defaults | settings)),
        )
        self.bucket: set[ChunkKey] = set()
        self.orders: list[tuple[BucketJob, int]] = []
        self.now_s = 0.0

    def ensure(self, request_id: str, *items: Wanted) -> bool:
        self.planner.meet(request_id, ((item.identifier, item) for item in items))
        ready = self.planner.ensure(request_id, items, self.now_s)
        for order in self.planner.take_fetches():
            self.orders.append((order, WIDTH))
        return ready

    def answer(
        self, outcome: Outcome | None = None, seconds: float = 0.1, *, near: bool = False
    ) -> Outcome:
        """Let the oldest order end: as the bucket would have it, or as told."""
        order, width = self.orders.pop(0)
        if outcome is None:
            outcome = Outcome.OK if order.key in self.bucket else Outcome.MISSING
        assert order.item is not None
        length = object_bytes("BF16", order.item.rows, width) if outcome is Outcome.OK else 0
        end = JobEnd(order.job_id, JobKind.FETCH, outcome, length, seconds, near=near)
        self.planner.on_end(end, self.now_s)
        check(self.planner)
        return outcome

    def schedule(
        self, request_id: str, *items: Wanted, freed: tuple[str, ...] = (), saves: bool = True
    ) -> ItemPlan:
        """One pass of the engine that places these items."""
        for item in items:
            self.planner.promise(item.identifier)
            self.planner.allocated(request_id, item, self.now_s, saves=saves)
        plan = self.planner.plan(freed)
        check(self.planner)
        return plan

    def resident(self, item: Wanted) -> None:
        """Have the item in host memory, and nobody who wants it."""
        self.bucket.add(item.key)
        self.ensure("resident", item)
        self.answer()
        self.planner.finished("resident")
        assert self.holds(item)

    def holds(self, item: Wanted) -> bool:
        held = self.planner.ledger.table.lookup(item.key)
        return held is not None and held.is_resident
