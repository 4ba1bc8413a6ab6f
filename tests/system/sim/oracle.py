"""What must hold in the whole fleet, beside what each engine's own oracle checks.

1. Nothing is written to the bucket but the right bytes, under the right key.
2. A fetch that ends well has left in its slot exactly what its key stands for.
3. Every job ends as the bucket has answered it: a miss is never made up, a refusal never hidden.
4. Every job ends in time and after `max_attempts` requests at most; and when it has ended,
   nothing goes on in its name.
5. What was bad is read once more, later or when an upload finds it there, and then never again.
   What is deleted has been bad twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from s3kv.config import Config
from s3kv.messages import JobEnd, JobKind
from s3kv.types import Outcome
from tests.system.sim.meaning import Dictionary, Shard, format_of
from tests.system.sim.process import Order
from tests.system.sim.store import HANG_S, Connection
from tests.unit.planning.setup import Setup

REQUEST_BOUND_S = HANG_S + 2 * 6.0 + 1.0
"""One request with the slowest answers there are, and the pause before the next."""

MOST_RANGES = 8

_REASONS = {
    (JobKind.FETCH, Outcome.OK): "good",
    (JobKind.FETCH, Outcome.MISSING): "missing",
    (JobKind.FETCH, Outcome.CORRUPT): "bad",
    (JobKind.UPLOAD, Outcome.OK): "created",
    (JobKind.UPLOAD, Outcome.EXISTS): "exists",
    **{(kind, Outcome.DENIED): "denied" for kind in JobKind},
    **{(kind, Outcome.FAILED): "error" for kind in JobKind},
}

_LOOKS = {
    (JobKind.FETCH, Outcome.OK): "good",
    (JobKind.FETCH, Outcome.MISSING): "missing",
    (JobKind.FETCH, Outcome.CORRUPT): "bad",
    (JobKind.UPLOAD, Outcome.EXISTS): "exists",
}


def shard_of(namespace_digest: str, name: str) -> Shard:
    rank, world_size = name.partition("-")[0][1:], name.partition("of")[2].partition("-")[0]
    return Shard(int(namespace_digest, 16), int(world_size), int(rank))


class FleetOracle:
    def __init__(
        self,
        setup: Setup,
        dictionary: Dictionary,
        config: Config,
        log: Callable[[str], None],
    ) -> None:
        self.accusations: list[str] = []
        self._deletes = config.on_corrupt == "delete"
        # To delete a bad object: a GET, a HEAD, another GET and a DELETE, each with its attempts.
        # And each GET may be sent a second time.
        self._requests = config.max_attempts * (6 if self._deletes else 2)
        self._answers = self._requests
        if config.range_bytes:  # the ranges of an object, and then perhaps all of it
            self._requests += 2 * config.max_attempts
            self._answers = self._requests * MOST_RANGES
        self.seen: Counter[str] = Counter()
        self._log = log
        self._setup = setup
        self._dictionary = dictionary

    def accuse(self, what: str) -> None:
        self.accusations.append(what)

    def payload(self, shard: Shard, block_hash: bytes) -> bytes | None:
        """What a chunk of this hash consists of; None when the hash was made with a salt."""
        tokens = self._dictionary.tokens(block_hash, self._setup.chunk_tokens)
        return None if tokens is None else shard.payload(tokens)

    def check_put(self, key: str, data: bytes) -> None:
        *_, digest, _, block_hash, name = key.split("/")
        group, _, shard_name = name.removesuffix(".safetensors").partition("-")
        shard = shard_of(digest, shard_name)
        layout = format_of(shard, self._setup)
        expected = self.payload(shard, bytes.fromhex(block_hash))
        if group != "g0" or len(data) != layout.object_bytes:
            self.accuse(f"{len(data)} bytes were put as {key}")
        elif expected is not None and data[layout.header_bytes :] != expected:
            self.accuse(f"wrong bytes were put as {key}")

    def job_ended(
        self, order: Order, done: JobEnd, slab: memoryview, connection: Connection
    ) -> None:
        said = connection.answers.pop(order.object_key, [])
        self.seen[f"service {order.kind.value} {done.outcome.name} {done.reason}"] += 1
        what = f"job {done.job_id}, the {order.kind.value} of {order.object_key}"
        self._log(f"{what}, ends {done.outcome.name}: {'; '.join(said)}")
        if done.seconds > self._requests * REQUEST_BOUND_S:
            self.accuse(f"{what}, took {done.seconds} s")
        if connection.busy[order.object_key]:
            self.accuse(f"{what}, has ended, and its request goes on")
        if len(said) > self._answers:
            self.accuse(f"{what}, was tried {len(said)} times")
        if not self._is_true(order, done, said, connection):
            self.accuse(f"{what}, ended {done.outcome.name}, but the bucket said {said}")
        if order.kind is JobKind.FETCH and done.outcome is Outcome.OK:
            self._check_fetched(what, order, slab)
        end = _LOOKS.get((order.kind, done.outcome))
        if end is not None and done.reason != "quarantined" and not self._deletes:
            connection.ended(order.object_key, end)

    def _is_true(self, order: Order, done: JobEnd, said: list[str], connection: Connection) -> bool:
        if done.reason == "quarantined":
            return done.outcome is Outcome.MISSING and order.object_key in connection.bad
        if done.outcome is Outcome.CANCELLED:
            return True
        if done.outcome is Outcome.OK and order.kind is JobKind.FETCH:
            return "good" in said or said.count("good range") > 1
        if done.outcome is Outcome.CORRUPT and "bad range" in said:
            return True
        return _REASONS[order.kind, done.outcome] in said

    def _check_fetched(self, what: str, order: Order, slab: memoryview) -> None:
        shard = shard_of(order.namespace_digest, order.shard)
        layout = format_of(shard, self._setup)
        expected = self.payload(shard, order.key.block_hash)
        at = order.offset
        held = slab[at + layout.header_bytes : at + layout.object_bytes]
        if expected is not None and held != expected:
            self.accuse(f"{what}, left other bytes in its slot")
