"""A fleet on one bucket, from a seed: everything that happens, and when.

seed ──▶ engines of two models, sizes, settings ──▶ 6 s of requests, weather and accidents
     ──▶ every request has to end ──▶ the weather clears ──▶ everything has to come to rest,
         every book to balance ──▶ and every engine has to use the bucket again
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from s3kv.config import Config
from s3kv.upkeep.refreshing import LOOK_S
from tests.system.sim import weather
from tests.system.sim.compressing import MIXTURES, SEGMENTS_BYTES, Form
from tests.system.sim.encrypting import MIXTURES as KEY_MIXTURES
from tests.system.sim.encrypting import SEGMENTS_BYTES as ENCRYPTED_SEGMENTS_BYTES
from tests.system.sim.loop import VirtualLoop
from tests.system.sim.meaning import Dictionary
from tests.system.sim.node import Node, Surroundings
from tests.system.sim.oracle import FleetOracle
from tests.system.sim.store import Bucket
from tests.unit.planning.setup import Setup

ACTIVE_S = 6.0
REQUEST_BOUND_S = 120.0
"""After the last request has come, whatever the weather. A process that is stopped while it starts
is killed after 90 s."""
REST_BOUND_S = 250.0
"""After the weather has cleared: four pauses between attempts of an upload add up to 80 s, a
process that hangs is noticed after 30, and the longest pause before another is started is 30."""
_REST_STEP_S = 5.0

GEOMETRIES = [(4, 2, 2), (4, 4, 4), (4, 4, 2), (8, 2, 2)]
"""Tokens per chunk, block and hash."""


class Fleet:
    """One run. `log`, when given, is told everything."""

    active_s = ACTIVE_S
    gap_s = 0.2
    """Mean time between two things that happen."""
    prompts = "ab"
    """Letters with which prompts begin."""
    lengths: tuple[int, ...] = (5, 8, 12, 17, 20)
    """Of prompts, in tokens."""
    node_type = Node

    def __init__(self, seed: int, log: Callable[[str], None] | None = None) -> None:
        self.rng = random.Random(seed)
        self.form_rng = random.Random(f"forms {seed}")
        self.forms = self.form_rng.choice(MIXTURES)
        self.key_rng = random.Random(f"keys {seed}")
        self.secrets = self.key_rng.choice(KEY_MIXTURES)
        self.refresh_after_s = 1.0 if seed % 2 else 0.0
        self.loop = VirtualLoop()
        self.seen: Counter[str] = Counter()
        self._log = log
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._requests = itertools.count(1)
        sizes = self.draw_sizes()
        self._dictionary = Dictionary()
        self.constants: dict[str, Any] = {}
        """Constants of `lab.constants`, for the run."""
        config = self.draw_config()
        self.oracle = FleetOracle(
            Setup(**sizes),
            self._dictionary,
            config,
            self.constants,
            self.log,
            keys=max(map(len, self.secrets)),
        )
        self.bucket = self.make_bucket(config)
        around = Surroundings(
            self.rng,
            self.loop,
            self.bucket,
            self._dictionary,
            self.oracle,
            itertools.count(1),
            config,
            self.log,
            self.forms,
            self.form_rng,
            self.secrets,
            self.key_rng,
        )
        self.nodes = [self._draw_node(number, sizes, around) for number in range(3)]

    def draw_sizes(self) -> dict[str, Any]:
        """The part of `Setup` that all engines have in common."""
        chunk, block, hashed = self.rng.choice(GEOMETRIES)
        return {"chunk_tokens": chunk, "block_tokens": block, "hash_tokens": hashed}

    def draw_config(self) -> Config:
        rng = self.rng
        self.constants |= {"start_timeout_s": 3.0, "max_attempts": rng.choice([1, 2, 3])}
        requests = rng.choice([2, 8, 32])
        self.constants["hedge_percent"] = rng.choice([0.0, 5.0, 100.0])
        self.constants["range_bytes"] = rng.choice([0, 1024])
        self.constants["compressed_segment_bytes"] = self.form_rng.choice(SEGMENTS_BYTES)
        self.constants["encrypted_segment_bytes"] = self.key_rng.choice(ENCRYPTED_SEGMENTS_BYTES)
        # Where nobody compresses, objects have no compressed form either.
        self.constants["least_compressed_bytes"] = 2**18 if self.forms == ("plain",) else 1
        return Config(
            bucket="bkt",
            max_inflight_requests=requests,
            on_unavailable="serve",
            refresh_after_s=self.refresh_after_s,
        )

    def make_bucket(self, config: Config) -> Bucket:
        return Bucket(self.rng, *self.watchers())

    def watchers(self) -> tuple[Any, ...]:
        """Of a bucket, and its clock."""
        oracle = self.oracle
        return oracle.accuse, oracle.check_put, self.loop.time, oracle.names

    def _draw_node(self, number: int, sizes: dict[str, Any], around: Surroundings) -> Node:
        rng = self.rng
        world_size, stages = self.draw_ranks()
        setup = Setup(
            **sizes,
            world_size=world_size,
            slots=rng.choice([4, 6, 8, 12]),
            blocks=rng.choice([12, 16, 24, 40]),
            probe_chunks=rng.randint(1, 4),
            max_wait_s=rng.choice([0.0, 0.5, 2.0, 5.0]),
            gate=rng.random() < 0.3,
            max_saves_inflight=rng.randint(2, 8),
            miss_ttl_s=rng.choice([0.1, 1.0, 20.0]),
            steps_ahead=rng.randint(0, 1),
        )
        # The last engine serves another model, from the same prompts.
        model, step_s = int(number == 2), rng.choice([0.05, 0.1, 0.3])
        return self.node_type(number, model, setup, step_s, around, stages)

    def draw_ranks(self) -> tuple[int, int]:
        """Number of ranks of an engine, and of their pipeline stages."""
        return self.rng.choice([1, 1, 2]), 1

    def publish(self, node: Node, prompt: list[int]) -> None:
        """Another replica, which is not simulated, saves the chunks of a prompt."""
        node.publish(self._dictionary.chain(prompt), form=self.draw_form(node))

    def draw_form(self, node: Node) -> Form:
        """Of an object that another replica saves. In the end, each engine can use it."""
        is_readable = node.decodes or self.bucket.weather is not weather.CLEAR
        return self.form_rng.choice(self.forms) if is_readable else "plain"

    # --- the whole run -----------------------------------------------------------------------

    def run(self) -> None:
        """Raises AssertionError for what must not be; and what the code under test raises."""
        for node in self.nodes:
            self._start(node)
        self._at(0.0, self._happen)
        self._run_while(lambda: self.loop.time() < self.active_s, self.active_s + 60.0)
        self._events = [event for event in self._events if event[2] != self._happen]
        self.log("no more requests")
        until_s = self.loop.time() + REQUEST_BOUND_S
        self._run_while(lambda: any(node.is_up and node.requests for node in self.nodes), until_s)
        unanswered = {n.number: [r.request_id for r in n.requests] for n in self.nodes if n.is_up}
        assert not any(unanswered.values()), f"not answered in time: {unanswered}"
        self.clear_up()
        self._use_again()
        self._use_above()
        self._end()

    def clear_up(self) -> None:
        self.log("the weather clears")
        self.bucket.weather = weather.CLEAR
        for node in self.nodes:
            if not node.is_up:
                self._start(node)
            for process in node.processes:  # those of earlier lives have nobody to replace them
                process.thaw()
        self._come_to_rest()

    def _come_to_rest(self) -> None:
        self._events.clear()
        until_s = self.loop.time() + REST_BOUND_S
        while not all(node.is_at_rest for node in self.nodes):
            assert self.loop.time() < until_s, "something never ends"
            for node in self.nodes:
                node.step()
                self._check()
            busy = any(node.has_work for node in self.nodes)
            self.loop.run_until(self.loop.time() + (0.2 if busy else _REST_STEP_S))
        for node in self.nodes:
            node.check_books()

    def _use_again(self) -> None:
        """Whatever has happened: an engine that shares the bucket fetches from it again."""
        for node in self.nodes:
            if node.seen["resets here"]:
                continue
            size = node.setup.chunk_tokens
            before = node.engine.planner.counters["fetch_ok"]
            for attempt in range(5):
                prompt = [ord("p"), node.number, attempt, *[ord("q")] * size]
                self.publish(node, prompt)
                self._arrive(node, prompt, 1)
                self._come_to_rest()
                if node.engine.planner.counters["fetch_ok"] > before:
                    break
                self.loop.run_until(self.loop.time() + 31.0)
            else:
                raise AssertionError(f"engine {node.number} never uses the bucket again")

    def _use_above(self) -> None:
        """What an engine has in memory and uses is in the bucket, whoever deletes it there."""
        for node in self.nodes:
            if node.seen["resets here"]:
                continue
            keys = self.use(node)
            for key in keys:
                self.bucket.lose(key)
            self.loop.run_until(self.loop.time() + LOOK_S)
            for _ in range(5):
                self.use(node)
                if all(map(self.bucket.has, keys)):
                    break
                self.loop.run_until(self.loop.time() + 400.0)
            else:
                raise AssertionError(f"engine {node.number} uses what the bucket lacks: {keys}")

    def use(self, node: Node) -> list[str]:
        """Compute or use one chunk that no other engine has. Returns the keys of its objects."""
        prompt = [ord("u"), node.number, *[ord("u")] * node.setup.chunk_tokens]
        self._arrive(node, prompt, 1)
        self._come_to_rest()
        return node.keys(self._dictionary.chain(prompt))

    def _end(self) -> None:
        for node in self.nodes:
            node.shut_down()
            self.seen += node.seen
            for process in node.processes:
                self.seen += process.compression_counters
        self.loop.run_until(self.loop.time() + 10.0)
        self._check()
        self.seen += self.oracle.seen + self.bucket.seen
        left = [p.pid for node in self.nodes for p in node.processes if not p.is_dead()]
        assert not left, f"processes outlive their engines: {left}"

    # --- time --------------------------------------------------------------------------------

    def _at(self, delay_s: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.loop.time() + delay_s, next(self._count), call))

    def _run_while(self, goes_on: Callable[[], bool], until_s: float) -> None:
        while self._events and goes_on() and self._events[0][0] <= until_s:
            when_s, _, call = heapq.heappop(self._events)
            self.loop.run_until(when_s)
            call()
            self._check()

    def _check(self) -> None:
        wrong = self.oracle.accusations
        assert not wrong, "; ".join(wrong)
        if self.loop.failures:  # errors of the code: no finding about its behaviour
            raise RuntimeError("; ".join(self.loop.failures))

    def log(self, what: str) -> None:
        if self._log is not None:
            self._log(f"{self.loop.time():9.3f} {what}")

    # --- what happens ------------------------------------------------------------------------

    def _happen(self) -> None:
        self._at(self.rng.expovariate(1 / self.gap_s), self._happen)
        happenings = self.happenings()
        (call,) = self.rng.choices([call for call, _ in happenings], [w for _, w in happenings])
        node = self.rng.choice(self.nodes)
        if node.is_up:
            call(self, node)

    def happenings(self) -> list[Happening]:
        """What may happen, and how often beside the rest."""
        return HAPPENINGS

    def request(self, node: Node) -> None:
        if len(node.requests) >= 5:
            return
        rng = self.rng
        letter, fork = rng.choice(self.prompts), rng.choice([6, 8, 20])
        rest = [ord("z")] * max(self.lengths)
        prompt = ([ord(letter)] * fork + rest)[: rng.choice(self.lengths)]
        if rng.random() < 0.3:
            self.publish(node, prompt)
        self._arrive(node, prompt, rng.randint(1, 4))

    def _arrive(self, node: Node, prompt: list[int], new_tokens: int) -> None:
        name = f"r{next(self._requests)}"
        self.log(f"engine {node.number}: {name} arrives, {len(prompt)} tokens")
        node.engine.now_s = self.loop.time()
        node.engine.arrive(name, prompt, new_tokens)
        self.plan_step(node, 0.0)

    def plan_step(self, node: Node, delay_s: float) -> None:
        node.steps_planned += 1
        self._at(delay_s, lambda number=node.steps_planned: self._step(node, number))  # type: ignore[misc]

    def _step(self, node: Node, number: int) -> None:
        if not node.is_up or number != node.steps_planned:
            return
        node.step()
        if node.has_work:
            self.plan_step(node, node.step_s * self.rng.uniform(0.5, 1.5))

    def abort(self, node: Node) -> None:
        if node.requests:
            request = self.rng.choice(node.requests)
            self.log(f"engine {node.number}: {request.request_id} is aborted")
            node.engine.abort(request)

    def preempt(self, node: Node) -> None:
        if node.engine.running:
            node.engine.preempt(self.rng.choice(node.engine.running))

    def squeeze(self, node: Node) -> None:
        """The engine loses its own cache, and with some luck a running request is preempted."""
        self.preempt(node)
        node.engine.pool.forget()

    def reset(self, node: Node) -> None:
        self.log(f"engine {node.number}: the cache is reset")
        node.seen["resets here"] += 1
        node.reset()

    def crash(self, node: Node) -> None:
        self.log(f"engine {node.number}: crashes")
        self.seen["crashes"] += 1
        node.crash()
        self._at(self.rng.uniform(0.1, 2.0), lambda: self._start(node))

    def shut_down(self, node: Node) -> None:
        self.log(f"engine {node.number}: is shut down")
        self.seen["shutdowns"] += 1
        node.shut_down()
        self._at(self.rng.uniform(0.1, 2.0), lambda: self._start(node))

    def _start(self, node: Node) -> None:
        if not node.is_up:
            node.seen["resets here"] = 0
            node.start()
            self.log(f"engine {node.number}: is up")

    def kill_io_process(self, node: Node) -> None:
        process = node.living_process()
        if process is not None:
            self.log(f"engine {node.number}: I/O process {process.pid} is killed")
            self.seen["I/O processes killed"] += 1
            process.die()

    def freeze_io_process(self, node: Node) -> None:
        process = node.living_process()
        if process is not None:
            self.log(f"engine {node.number}: I/O process {process.pid} is stopped")
            self.seen["I/O processes stopped"] += 1
            process.freeze()
            if self.rng.random() < 0.7:
                self._at(self.rng.choice([0.2, 2.0, 20.0]), process.thaw)

    def lose_object(self, node: Node) -> None:
        keys = self.bucket.keys()
        if keys:
            self.bucket.lose(self.rng.choice(keys))
            self.seen["objects lost"] += 1

    def damage_object(self, node: Node) -> None:
        keys = self.bucket.keys()
        if keys:
            key, other = self.rng.choice(keys), self.rng.choice(keys)
            data = self.bucket.objects._objects[other][0]
            if key == other:
                data = self.bucket.tamper(data, self.rng.choice(["flip", "short", "long"]))
            self.bucket.damage(key, data)
            self.seen["objects damaged"] += 1

    def replace_objects(self, node: Node) -> None:
        """Another replica has found them to be bad, and saves them in a form of its own."""
        letter = self.rng.choice(self.prompts)
        prompt = [ord(letter)] * max(self.lengths)
        form = self.form_rng.choice(self.forms)
        node.publish(self._dictionary.chain(prompt), form=form, replaces=True)
        self.seen["objects replaced"] += 1

    def change_weather(self, node: Node) -> None:
        self.bucket.weather = weather.draw(self.rng)
        self.log(f"the bucket is {self.bucket.weather.name}")


Happening = tuple[Callable[[Any, Node], None], float]
HAPPENINGS: list[Happening] = [
    (Fleet.request, 12),
    (Fleet.abort, 2.5),
    (Fleet.preempt, 1),
    (Fleet.squeeze, 3),
    (Fleet.reset, 0.5),
    (Fleet.crash, 0.4),
    (Fleet.shut_down, 0.3),
    (Fleet.kill_io_process, 0.7),
    (Fleet.freeze_io_process, 0.3),
    (Fleet.lose_object, 1.5),
    (Fleet.damage_object, 0.7),
    (Fleet.replace_objects, 1.5),
    (Fleet.change_weather, 1.5),
]
