"""A fleet whose engines keep the bucket to a budget, from a seed.

Hours pass instead of seconds, with the cleaner's own intervals. Beside what befalls every fleet,
I/O processes are stopped for longer than a lease lasts and wake, the lease is lost, and prompts
come that nobody has sent before. In the end the weather clears, and the fleet writes as much as its
budget. What must hold, beside all that holds of every fleet:

1. Nothing is deleted outside the prefix, nor anything under it that is not s3kv's own.
2. Nothing is deleted that was younger than `MIN_AGE_S` when it was listed, and nothing by a
   listing from before a stop that was longer than a lease.
3. In that turnover the bucket exceeds its budget by no more than what is written between two
   sweeps, and afterwards it returns to it.
4. A chunk that was deleted is a miss, never an error: every fetch ends as the bucket has answered.
5. What an engine uses all the time is not deleted as idle, though it is served from memory.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque
from collections.abc import Callable

from s3kv.config import Config
from s3kv.upkeep.cleaner import SWEEP_MAX_S
from tests.system.sim.fleet import HAPPENINGS, Fleet, Happening
from tests.system.sim.meaning import Shard, format_of
from tests.system.sim.node import Node
from tests.system.sim.store import LEASE, Bucket
from tests.unit.planning.setup import Setup

FOREIGN = frozenset(
    {
        "s3kv/v3/readme.txt",
        f"s3kv/v3/{'c' * 32}/00/notes",
        "s3kv/doctor/1",
        "s3kv-of-others/v3/cleaner.json",
        f"other/v3/{'0' * 32}/00/{'00' * 32}/g0-whole.safetensors",
        f"s3kv/v3/nested/v3/{'0' * 32}/00/{'00' * 32}/g0-whole.safetensors",
    }
)
"""Keys beside s3kv's own, older than anything. The last two are chunks of other prefixes."""
ACTIVE_S = 7_200.0
GAP_S = 20.0
BUDGETS = (12, 24, 48)
"""In chunks of one rank."""
TURNOVER_S = 6 * 3_600.0
"""Half of it is longer than what may pass before the first sweep: a cleaner waits for an hour after
a refusal, and a fleet is without a cleaner for half an hour at most."""
UNSWEPT_S = SWEEP_MAX_S + 60.0
STALLS_S = (20.0, 400.0, 3_000.0)


class KeptFleet(Fleet):
    active_s = ACTIVE_S
    gap_s = GAP_S
    prompts = "abcdefghijkl"

    def __init__(self, seed: int, log: Callable[[str], None] | None = None) -> None:
        self._new = itertools.count()
        super().__init__(seed, log)

    def draw_config(self) -> Config:
        config = super().draw_config()
        rng = self.rng
        self._chunk_bytes = format_of(Shard.of(0, 1, 0), Setup()).object_bytes
        config = dataclasses.replace(
            config,
            bucket_bytes=rng.choice(BUDGETS) * self._chunk_bytes,
            bucket_idle_s=rng.choice([0.0, 0.0, 1_800.0]),
        )
        self.constants["bucket_min_age_s"] = rng.choice([60.0, 600.0])
        return config

    def make_bucket(self, config: Config) -> Bucket:
        self._budget_bytes, self._idle_s = config.bucket_bytes, config.bucket_idle_s
        return Bucket(
            self.rng,
            *self.watchers(),
            min_age_s=self.constants["bucket_min_age_s"],
            foreign=FOREIGN,
            deletes_on_condition=self.rng.random() < 0.7,
        )

    def happenings(self) -> list[Happening]:
        return [*HAPPENINGS, *MORE]

    def clear_up(self) -> None:
        super().clear_up()
        self._turn_over()
        if self._idle_s:
            self._use_for_long()

    def _turn_over(self) -> None:
        """Others write as much as the budget, and engines step now and then."""
        pieces = self._budget_bytes // self._chunk_bytes
        step_s = TURNOVER_S / pieces
        size = self.nodes[0].setup.chunk_tokens
        written: deque[tuple[float, int]] = deque()
        begin_s = self.loop.time()
        for number in range(pieces):
            self._pass(step_s)
            prompt = [ord("t"), number, *[ord("t")] * size]
            before = self.stored_bytes()
            self.nodes[0].publish(self._dictionary.chain(prompt))
            now_s = self.loop.time()
            written.append((now_s, self.stored_bytes() - before))
            while written[0][0] < now_s - UNSWEPT_S:
                written.popleft()
            if now_s - begin_s > TURNOVER_S / 2:
                self._check_budget(sum(nbytes for _, nbytes in written))
        self._pass(UNSWEPT_S)
        self._check_budget(0)
        left = FOREIGN - self.bucket.objects._objects.keys()
        assert not left, f"others' objects are gone: {left}"
        self._come_to_rest()

    def _use_for_long(self) -> None:
        """Engines use their chunk in memory, and nobody reads it from the bucket."""
        for node in self.nodes:
            if node.seen["resets here"]:
                continue
            for _ in range(5):
                keys = self.use(node)
                if all(map(self.bucket.has, keys)):  # or a copy has failed
                    break
            until_s = self.loop.time() + 2 * self._idle_s
            while self.loop.time() < until_s:
                self._pass(self._idle_s / 20)
                self.use(node)
                gone = [key for key in keys if not self.bucket.has(key)]
                assert not gone, f"engine {node.number} uses what has been deleted: {gone}"

    def _pass(self, seconds: float) -> None:
        self.loop.run_until(self.loop.time() + seconds)
        for node in self.nodes:
            node.step()
        self._check()

    def _check_budget(self, new_bytes: int) -> None:
        held = self.stored_bytes()
        most = self._budget_bytes + new_bytes
        assert held <= most, f"{held} bytes are stored, of {most} at most"

    def stored_bytes(self) -> int:
        """Of chunks."""
        objects = self.bucket.objects._objects
        return sum(len(objects[key][0]) for key in objects if key not in FOREIGN | {LEASE})

    def stall(self, node: Node) -> None:
        """Now, or in the middle of its next sweep."""
        process = node.living_process()
        if process is None:
            return
        stall_s = self.rng.choice(STALLS_S)

        def stop() -> None:
            self.log(f"engine {node.number}: I/O process {process.pid} stops for {stall_s:g} s")
            self.seen["long stalls"] += 1
            process.freeze()
            self._at(stall_s, process.thaw)

        where = self.rng.choice(["", "listing", "deletion"])
        if where:
            process.connection.interruption = where, stop
        else:
            stop()

    def lose_lease(self, node: Node) -> None:
        self.seen["leases lost"] += self.bucket.has(LEASE)
        self.bucket.lose(LEASE)

    def new_prompt(self, node: Node) -> None:
        prompt = [ord("n"), next(self._new), *[ord("n")] * 18]
        if self.rng.random() < 0.5:
            node.publish(self._dictionary.chain(prompt))
        if len(node.requests) < 5:
            self._arrive(node, prompt, 1)


MORE: list[Happening] = [
    (KeptFleet.stall, 4),
    (KeptFleet.lose_lease, 0.3),
    (KeptFleet.new_prompt, 6),
]
