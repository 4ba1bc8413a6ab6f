"""Random fleets of requests against the planner of encoder outputs: what is promised is there.

The engine here does what vLLM's scheduler does with an encoder cache: it evicts from it, places
items, preempts, aborts, and keeps steps in flight. The slab is real bytes, written by fetches and
read by the loads of steps that run later, so an item evicted too early is read as another's.
"""

from __future__ import annotations

import random
from collections import deque
from hashlib import sha256

import pytest

from lab.books import check
from s3kv.host.room import PAGE_BYTES
from s3kv.messages import ItemLoad, ItemReport
from s3kv.objects.item_format import object_bytes
from s3kv.planning.items import Wanted
from s3kv.types import ChunkKey, Outcome
from tests.unit.planning.ec_desk import MIB, WIDTH, Desk, wanted

STEPS_INFLIGHT = 2


class Engine:
    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.desk = Desk(slab_bytes=MIB, steps_inflight=STEPS_INFLIGHT, max_wait_s=2.0)
        self.items = [wanted(f"i{n}", rows=self.draw.randrange(1, 3_000)) for n in range(40)]
        self.desk.bucket = {i.key for i in self.items if self.draw.random() < 0.5}
        self.slab: dict[int, tuple[int, bytes]] = {}
        """What lies where: by offset, its end and whose bytes they are."""
        self.cache: dict[str, None] = {}
        self.waiting: dict[str, list[Wanted]] = {}
        self.steps: deque[tuple[ItemLoad, ...]] = deque()
        self.loaded = self.encoded = self.requests = 0

    def turn(self) -> None:
        self.desk.now_s += self.draw.uniform(0, 0.2)
        if self.draw.random() < 0.4:
            self.requests += 1
            self.waiting[f"r{self.requests}"] = self.draw.choices(
                self.items, k=self.draw.randrange(1, 5)
            )
        self._answers()
        self._pass()
        while len(self.steps) >= STEPS_INFLIGHT or (self.steps and self.draw.random() < 0.3):
            self._run(self.steps.popleft())
        if self.waiting and self.draw.random() < 0.1:
            victim = self.draw.choice(list(self.waiting))
            del self.waiting[victim]
            self.desk.planner.finished(victim)
        if self.draw.random() < 0.01:
            self._reset()

    def _reset(self) -> None:
        """The encoder has changed, after all steps: nothing that the old one made is loaded."""
        while self.steps:
            self._run(self.steps.popleft())
        self.desk.planner.reset()
        self.cache.clear()
        self.waiting = {name: [] for name in self.waiting}
        self.items = [
            i._replace(key=ChunkKey(0, sha256(i.key.block_hash).digest())) for i in self.items
        ]

    def _answers(self) -> None:
        orders = self.desk.orders
        for job_id in self.desk.planner.take_cancels():
            if self.draw.random() < 0.7:
                index = next(n for n, (o, _) in enumerate(orders) if o.job_id == job_id)
                orders.insert(0, orders.pop(index))
                self.desk.answer(Outcome.CANCELLED)
        while orders and self.draw.random() < 0.5:
            orders.insert(0, orders.pop(self.draw.randrange(len(orders))))
            order = orders[0][0]
            outcome = self.desk.answer(Outcome.FAILED if self.draw.random() < 0.1 else None)
            if outcome is Outcome.OK:
                at = order.slot * PAGE_BYTES
                end = at + object_bytes("BF16", order.item.rows, WIDTH)
                self.slab[at] = (end, order.key.block_hash)

    def _pass(self) -> None:
        """One scheduling pass: it schedules some requests, and drops some of the engine's items."""
        freed = [i for i in list(self.cache) if self.draw.random() < 0.2]
        for identifier in freed:
            del self.cache[identifier]
        for name, items in list(self.waiting.items()):
            ready = self.desk.ensure(name, *items)
            for order, _ in self.desk.orders:
                at = order.slot * PAGE_BYTES
                self._overwrite(at, at + order.item.nbytes)
            if not ready:
                continue
            for item in items:
                if item.identifier in self.cache:
                    continue
                promised = self.desk.planner.promise(item.identifier)
                if self.draw.random() < 0.1:
                    break  # no room after all; it comes back in a later pass
                self.desk.planner.allocated(name, item, self.desk.now_s, saves=True)
                self.cache[item.identifier] = None
                self.encoded += not promised
            else:
                if self.draw.random() < 0.8:  # else preempted, and back with the same items
                    del self.waiting[name]
                    self.desk.planner.finished(name)
        plan = self.desk.planner.plan([i for i in freed if i not in self.cache])
        self.steps.append(plan.loads)
        saved = [save.key for save in plan.saves if self.draw.random() < 0.8]
        self.desk.bucket.update(saved)
        self.desk.planner.on_report(ItemReport(uploaded=dict.fromkeys(saved, 60.0)), 0.0)
        check(self.desk.planner)

    def _overwrite(self, begin: int, end: int) -> None:
        for at, (until, _) in list(self.slab.items()):
            if at < end and begin < until:
                del self.slab[at]

    def _run(self, loads: tuple[ItemLoad, ...]) -> None:
        by_name = {item.identifier: item for item in self.items}
        for load in loads:
            item = by_name[load.identifier]
            there = (load.offset + load.nbytes, item.key.block_hash)
            assert self.slab.get(load.offset) == there, f"{load} was evicted"
            assert load.nbytes == object_bytes("BF16", item.rows, WIDTH)
            assert (load.rows, load.width) == (item.rows, WIDTH)
            self.loaded += 1


@pytest.mark.parametrize("seed", range(12))
def test_whatever_is_promised_is_there_when_the_step_runs(seed: int) -> None:
    engine = Engine(seed)
    for _ in range(400):
        engine.turn()
    assert engine.loaded > 20, (seed, engine.loaded)
    assert engine.encoded > 20, (seed, engine.encoded)
    table = engine.desk.planner.ledger.table
    assert engine.desk.planner.counters["evictions"] > 20, "the slab was not contended"
    for name in list(engine.waiting):
        engine.desk.planner.finished(name)
    while engine.desk.orders:
        engine.desk.answer()
    for _ in range(STEPS_INFLIGHT + 1):
        engine.desk.planner.plan(())
    check(engine.desk.planner)
    assert not any(entry.pins for entry in table.entries()), f"seed {seed}: a lease is left"
    assert engine.desk.planner._names == {}
    assert engine.desk.planner._requests == {}
