"""One engine of the fleet through all its lives: it starts, serves, dies, and starts again."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from lab.books import check
from s3kv.config import Config
from s3kv.errors import S3KVError
from s3kv.io import wire
from s3kv.messages import EMPTY_PLAN
from s3kv.place import Place
from tests.system.sim.compressing import Form, compressed
from tests.system.sim.encrypting import Secrets
from tests.system.sim.loop import VirtualLoop
from tests.system.sim.meaning import Dictionary, Shard, format_of, object_key
from tests.system.sim.memory_disk import Disk
from tests.system.sim.oracle import FleetOracle
from tests.system.sim.process import Machine, Process
from tests.system.sim.rank import Rank
from tests.system.sim.store import Bucket
from tests.system.sim.weather import CLEAR
from tests.unit.planning.engine import Engine
from tests.unit.planning.oracle import objects_of
from tests.unit.planning.setup import Request, Setup

_DRAIN_S = 2.0


@dataclass
class Surroundings:
    """What all engines of a fleet share."""

    rng: random.Random
    loop: VirtualLoop
    bucket: Bucket
    dictionary: Dictionary
    oracle: FleetOracle
    numbers: Iterator[int]
    config: Config
    log: Callable[[str], None]
    forms: tuple[Form, ...]
    """Of its processes, by chance."""
    form_rng: random.Random
    secrets: tuple[Secrets, ...]
    """Of its engines, by chance: of each, until it starts again."""
    key_rng: random.Random


class Node:
    """number: for the log. step_s: how long a step of this engine takes. stages: of a pipeline."""

    def __init__(
        self,
        number: int,
        model: int,
        setup: Setup,
        step_s: float,
        around: Surroundings,
        stages: int = 1,
    ) -> None:
        self.number = number
        self.model = model
        self.setup = setup
        self.step_s = step_s
        self.stages = stages
        self.is_up = False
        self.steps_planned = 0
        """The step that is planned next is this one; any other has been overtaken."""
        self.seen: Counter[str] = Counter()
        self.disk: Disk | None = None
        self.decodes = True
        """Whether all its processes can decode compressed objects."""
        self.processes: list[Process] = []
        """Of all lives."""
        self.secrets = around.key_rng.choice(around.secrets)
        self._around = around
        self._rng = around.rng

    def machine(self) -> Machine:
        around = self._around
        machine = Machine(around.loop, self._rng, around.bucket, None, [], around.oracle, self.disk)
        machine.form = around.form_rng.choice(around.forms)
        machine.secrets = self.secrets
        self.decodes = self.decodes and machine.form != "unreadable"
        return machine

    def shards(self) -> list[Shard]:
        size = self.setup.world_size
        return [Shard.of(self.model, size, rank, self.stages) for rank in range(size)]

    def start(self) -> bool:
        """False when it did not start; the bucket must not be the reason."""
        around = self._around
        self.decodes = True
        self.ranks = [
            Rank(self.machine(), shard, self.setup, around.config) for shard in self.shards()
        ]
        self.engine = Engine(
            self.setup, ranks=self.ranks, prefixes=around.dictionary, numbers=around.numbers
        )
        for rank in self.ranks:
            rank.client.start()
        if self._rng.random() < 0.3:
            for rank in self.ranks:
                try:
                    # The process gives up on the bucket first, and says so.
                    rank.client.wait_ready(wire.START_TIMEOUT_S + 1.0)
                except S3KVError as error:
                    around.oracle.accuse(f"engine {self.number} does not start: {error!r}")
                    return False
        self.is_up = True
        return True

    def crash(self) -> None:
        """Every process of the engine is killed; an I/O process perhaps not, and finds out."""
        self._end_life()
        for rank in self.ranks:
            for process in rank.processes:
                process.die() if self._rng.random() < 0.5 else process.hang_up()

    def shut_down(self) -> None:
        self._end_life()
        for rank in self.ranks:
            rank.worker.shutdown(_DRAIN_S)
            if not all(process.is_dead() for process in rank.processes):
                self._around.oracle.accuse("an I/O process outlives the shutdown")

    def _end_life(self) -> None:
        self.is_up = False
        around = self._around
        if around.bucket.weather is not CLEAR:  # or else the next life finds what this one leaves
            self.secrets = around.key_rng.choice(around.secrets)
        self.seen += self.engine.what_happened()
        self.processes += [process for rank in self.ranks for process in rank.processes]

    @property
    def requests(self) -> list[Request]:
        engine = self.engine
        queues = (engine.loading.values(), engine.waiting, engine.running)
        return [request for queue in queues for request in queue if not request.over]

    @property
    def has_work(self) -> bool:
        """An engine without work does not step."""
        engine = self.engine
        return bool(
            engine.waiting
            or engine.running
            or engine.loading
            or any(output.sampled for output in engine._outputs)
            or engine.planner.ledger.has_copies_inflight
        )

    def step(self) -> None:
        rng, engine = self._rng, self.engine
        engine.now_s = self._around.loop.time()
        plan = engine.step(rng.choice([3, 8, 100, 100]), rng.choice(["", "", "", "y", "n", "yyn"]))
        if plan != EMPTY_PLAN:
            self._around.log(f"engine {self.number}: {plan}")

    def reset(self) -> None:
        self.engine.now_s = self._around.loop.time()
        self.engine.reset()

    def living_process(self) -> Process | None:
        living = [p for rank in self.ranks for p in rank.processes if not p.is_dead()]
        return self._rng.choice(living) if living else None

    @property
    def is_at_rest(self) -> bool:
        engine = self.engine
        return not (
            self.has_work
            or engine.planner.ledger.saves_inflight
            or engine.planner.ledger.fetches_inflight
            or engine.planner.ledger.uses_inflight
            or any(rank.worker.busy or rank.report.ends for rank in self.ranks)
        )

    def check_books(self) -> None:
        """Of an engine at rest: nothing is left of anything."""
        planner = self.engine.planner
        check(planner)
        figures = planner.ledger.table.statistics()
        assert (figures.reserved, figures.pinned, figures.dirty) == (0, 0, 0), figures
        assert figures.free + figures.clean == self.setup.slots, figures
        for rank in self.ranks:
            assert not rank.client._jobs
            assert not rank.orders, f"fetches without an end: {rank.orders}"
            living = [process for process in rank.processes if not process.is_dead()]
            assert len(living) <= 1, f"two I/O processes of one rank: {living}"

    def publish(
        self,
        chain: list[int],
        shards: Sequence[Shard] = (),
        *,
        form: Form = "plain",
        replaces: bool = False,
    ) -> list[str]:
        """Another replica of the same model, with the same shards or with these, saves the chunks
        of this prompt, also in the place of others. Returns the keys."""
        for shard in shards or self.shards():
            for key, tokens in objects_of(self.setup, chain):
                layout = format_of(shard, self.setup, group=key.group)
                payload = shard.payload(tokens, self.setup.coverage(key.group).block_tokens)
                data = bytearray(layout.header_bytes) + payload
                layout.seal(Place.of(data, layout.header_bytes), key.block_hash)
                found = bytes(data)
                if form == "compressed":
                    found = compressed(layout, found, key.block_hash)
                self._publish(object_key(shard, key), found, replaces=replaces)
        return self.keys(chain, shards)

    def _publish(self, name: str, data: bytes, *, replaces: bool) -> None:
        """Under one of this engine's master keys, if it encrypts."""
        around = self._around
        if self.secrets:
            secret = around.key_rng.choice(self.secrets)
            name, data = around.bucket.names.stored(name, data, secret)
        around.bucket.publish(name, data, replaces=replaces)

    def keys(self, chain: list[int], shards: Sequence[Shard] = ()) -> list[str]:
        """Of the objects that this engine makes of all chunks of this prompt."""
        keys = [key for key, _ in objects_of(self.setup, chain)]
        plain = [object_key(shard, key) for shard in shards or self.shards() for key in keys]
        return [self._around.bucket.names.of(key, self.secrets)[0] for key in plain]
