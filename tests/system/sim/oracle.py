"""What must hold in the whole fleet, beside what each engine's own oracle checks.

1. Nothing is written to the bucket but the right bytes, under the right key.
2. A fetch that ends well has left in its slot exactly what its key stands for.
3. Every job ends as the bucket has answered it: a miss is never made up, a refusal never hidden.
4. Every job ends in time and after `max_attempts` requests at most; and when it has ended,
   nothing goes on in its name.
5. An engine deletes its own objects alone, and puts a chunk together only of good ones that hold
   all of it.
6. What an engine uses in memory is in the bucket, too: when somebody has deleted it there, it comes
   back.
7. What was bad is read once more, later or when an upload finds it there, and then never again.
   What is deleted has been bad twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

from s3kv.config import Config
from s3kv.messages import JobEnd, JobKind
from s3kv.types import ChunkKey, Outcome
from tests.system.sim.compressing import is_compressed, payload_of
from tests.system.sim.encrypting import Names
from tests.system.sim.meaning import Dictionary, Shard, format_of
from tests.system.sim.process import Order
from tests.system.sim.store import HANG_S, WRITE, Connection
from tests.unit.planning.oracle import content_of
from tests.unit.planning.setup import Setup

REQUEST_BOUND_S = HANG_S + 2 * 6.0 + 1.0
"""One request with the slowest answers there are, and the pause before the next."""

MOST_RANGES = 8
MOST_SHARDS = 8
"""Of other sizes that a rank may read one after the other."""

_LOOKS = {
    (JobKind.FETCH, Outcome.OK): "good",
    (JobKind.FETCH, Outcome.MISSING): "missing",
    (JobKind.FETCH, Outcome.CORRUPT): "bad",
    (JobKind.UPLOAD, Outcome.EXISTS): "exists",
}
_REASONS = _LOOKS | {
    (JobKind.UPLOAD, Outcome.OK): "created",
    **{(kind, Outcome.DENIED): "denied" for kind in JobKind},
    **{(kind, Outcome.FAILED): "error" for kind in JobKind},
}

DISK = "disk"
"""`JobEnd.source` of a hit on the disk, whose bytes are checked like all others."""

_SPARED = ("quarantined", "codec")
"""Reasons of a miss that say nothing new of the object."""


def shard_of(namespace_digest: str, name: str) -> Shard:
    return Shard.named(int(namespace_digest, 16), name)


def _shard_name(key: str) -> str:
    return key.rpartition("/")[2].removesuffix(".safetensors").partition("-")[2]


def _are_lacking(order: Order, others: dict[str, list[str]], connection: Connection) -> bool:
    """Whether an object of another shard was not there, or was bad now or before; or none has been
    asked for."""
    chunk = _chunk(order.object_key)
    return (
        not others
        or any({"missing", "bad", "bad range"} & {*said} for said in others.values())
        or any(key.startswith(chunk) for key in connection.bad | connection.undecodable)
    )


def _chunk(key: str) -> str:
    """What the keys of all shards of a chunk begin with."""
    folder, _, name = key.rpartition("/")
    return f"{folder}/{name.partition('-')[0]}-"


def _is_good(said: list[str]) -> bool:
    """Of a range, all bytes may have arrived before an error."""
    is_in_ranges = said.count("good range") > 1 or {"good range", "error"} <= {*said}
    return "good" in said or is_in_ranges


class FleetOracle:
    def __init__(
        self,
        setup: Setup,
        dictionary: Dictionary,
        config: Config,
        constants: Mapping[str, Any],
        log: Callable[[str], None],
        keys: int,
    ) -> None:
        """keys: most master keys of an engine."""
        self.accusations: list[str] = []
        self.names = Names(constants["encrypted_segment_bytes"], self.accuse)
        self._keeps = config.bucket_bytes > 0
        """Where a cleaner deletes nothing, it is not asked about every use."""
        attempts = constants["max_attempts"] * max(1, keys)  # one request under each key
        self._requests = attempts * 2  # each GET may be sent a second time
        self._answers = self._requests
        if constants["range_bytes"]:  # the ranges of an object, and then perhaps all of it
            self._requests += 2 * attempts
            self._answers = self._requests * MOST_RANGES
        self._segment_bytes = constants["compressed_segment_bytes"]
        self._reads = 1 + MOST_SHARDS if config.share_ranks else 1
        self.seen: Counter[str] = Counter()
        self._log = log
        self._setup = setup
        self._dictionary = dictionary

    def accuse(self, what: str) -> None:
        self.accusations.append(what)

    def payload(self, shard: Shard, key: ChunkKey) -> bytes | None:
        """What a chunk consists of; None when its hash was made with a salt."""
        chain, coverage = self._dictionary.covered(key.block_hash), self._setup.coverage(key.group)
        if not chain:
            return None
        last = len(chain) // coverage.chunk_tokens - 1
        tokens = content_of(self._setup, coverage, chain, last, 0)
        return shard.payload(tokens, coverage.block_tokens)

    def check_put(self, key: str, data: bytes) -> None:
        stored, opened = data, self.names.opened(key, data)
        if opened is None:
            self.accuse(f"{key} does not decrypt as it is put")
            return
        key, data = self.names.object_of(key), opened
        *_, digest, _, block_hash, name = key.split("/")
        group = int(name.partition("-")[0].removeprefix("g"))
        shard = shard_of(digest, _shard_name(key))
        layout = format_of(shard, self._setup, group=group)
        expected = self.payload(shard, ChunkKey(group, bytes.fromhex(block_hash)))
        payload = payload_of(data, layout.header_bytes, self._segment_bytes)
        if len(payload) != layout.payload_bytes or len(data) > layout.object_bytes:
            self.accuse(f"{len(data)} bytes were put as {key}")
        elif expected is not None and payload != expected:
            self.accuse(f"wrong bytes were put as {key}")
        self.seen["compressed objects written"] += is_compressed(data)
        self.seen["encrypted objects written"] += stored != data

    def job_ended(
        self, order: Order, done: JobEnd, slab: memoryview, connection: Connection
    ) -> None:
        if order.kind is JobKind.USE:
            self._use_ended(order, done, connection)
            return
        # Where a rank still fetches what others have, or a save in a fetch's place has failed, a
        # chunk is fetched again: what goes on, and what the bucket has said, may be the other's.
        is_beside = connection.fetching[order.object_key] > 0
        if done.outcome is Outcome.CANCELLED and is_beside:
            self.seen["cancelled beside another fetch"] += 1
            return
        noted = order.object_key if order.kind is JobKind.FETCH else WRITE + order.object_key
        is_mixed = noted in connection.mixed
        connection.mixed -= {noted}
        said = connection.answers.pop(noted, [])
        others = self._of_others(order, connection)
        self.seen[f"service {order.kind.value} {done.outcome.name} {done.reason}"] += 1
        what = f"job {done.job_id}, the {order.kind.value} of {order.object_key}"
        self._log(f"{what}, ends {done.outcome.name}: {'; '.join(said)}")
        if done.seconds > self._requests * self._reads * REQUEST_BOUND_S + connection.frozen_s:
            self.accuse(f"{what}, took {done.seconds} s")
        under_way = connection.busy if order.kind is JobKind.FETCH else connection.writing
        if order.kind is JobKind.FETCH and is_beside:
            self.seen["ended beside another fetch"] += 1
            connection.mixed.add(noted)
        elif any(under_way[key] for key in (order.object_key, *others)):
            self.accuse(f"{what}, has ended, and its request goes on")
        self.seen["bad shards of others"] += any("bad" in answers for answers in others.values())
        if len(said) > self._answers:
            self.accuse(f"{what}, was tried {len(said)} times")
        if not is_mixed and not self._is_true(order, done, said, others, connection):
            self.accuse(f"{what}, ended {done.outcome.name}, but the bucket said {said} {others}")
        if order.kind is JobKind.FETCH and done.outcome is Outcome.OK:
            self._check_fetched(what, order, slab)
        self._clear(order, done, connection)
        if order.kind is JobKind.UPLOAD or done.outcome is not Outcome.CANCELLED:
            connection.found.discard(order.object_key)  # a cancelled fetch may not have begun
        if order.kind is JobKind.FETCH and done.outcome is Outcome.OK:
            connection.found.add(order.object_key)
        end = _LOOKS.get((order.kind, done.outcome))
        if end is not None and done.reason not in _SPARED and done.source != DISK:
            connection.ended(order.object_key, end)

    def _clear(self, order: Order, done: JobEnd, connection: Connection) -> None:
        """Count the compressed objects of a fetch, and forget them."""
        if order.kind is not JobKind.FETCH:
            return
        chunk = _chunk(order.object_key)
        read = {key for key in connection.unfolded if key.startswith(chunk)}
        if done.outcome is Outcome.OK and done.source != DISK:
            self.seen["compressed objects fetched"] += len(read)
        connection.unfolded -= read
        connection.undecodable -= read

    def _use_ended(self, order: Order, done: JobEnd, connection: Connection) -> None:
        self.seen[f"use {done.outcome.name}"] += 1
        what = f"job {done.job_id}, a use of {order.object_key}, ends {done.outcome.name}"
        self._log(what)
        found = connection.looks.get(order.object_key)
        wrong = {Outcome.EXISTS: "missing", Outcome.MISSING: "exists"}.get(done.outcome)
        if wrong is not None and found in (wrong, None) and not self._keeps:
            self.accuse(f"{what}, but the bucket said {found}")

    def _of_others(self, order: Order, connection: Connection) -> dict[str, list[str]]:
        """What the bucket has said of other shards of a fetched chunk."""
        if order.kind is not JobKind.FETCH:
            return {}
        chunk = _chunk(order.object_key)
        keys = [key for key in connection.answers if key.startswith(chunk)]
        return {key: connection.answers.pop(key) for key in keys if key != order.object_key}

    def _is_true(
        self,
        order: Order,
        done: JobEnd,
        said: list[str],
        others: dict[str, list[str]],
        connection: Connection,
    ) -> bool:
        if done.reason == "quarantined":
            return done.outcome is Outcome.MISSING and order.object_key in connection.bad
        if done.reason == "codec":
            is_missing = done.outcome is Outcome.MISSING
            return is_missing and order.object_key in connection.undecodable
        if done.outcome is Outcome.CANCELLED:
            return True
        if done.outcome is Outcome.OK and order.kind is JobKind.FETCH:
            self.seen["disk hits"] += done.source == DISK
            return (
                done.source == DISK
                or _is_good(said)
                or ("missing" in said and self._is_covered(order, others))
            )
        if done.outcome is Outcome.CORRUPT and "bad range" in said:
            return True
        if done.outcome is Outcome.EXISTS and "exists" not in said:
            return order.object_key in connection.found
        reason = _REASONS[order.kind, done.outcome]
        if reason in said:
            return done.outcome is not Outcome.MISSING or _are_lacking(order, others, connection)
        return "missing" in said and any(reason in answers for answers in others.values())

    def _is_covered(self, order: Order, others: dict[str, list[str]]) -> bool:
        """Whether good objects hold every head of every layer that the rank has."""
        digest, good = order.namespace_digest, [k for k, said in others.items() if _is_good(said)]
        shards = [shard_of(digest, _shard_name(key)) for key in good]
        held = {place for shard in shards for place in product(shard.heads, shard.layers)}
        own = shard_of(digest, order.shard)
        self.seen["put together"] += 1
        self.seen["put together of several"] += len(shards) > 1
        return held >= set(product(own.heads, own.layers))

    def _check_fetched(self, what: str, order: Order, slab: memoryview) -> None:
        shard = shard_of(order.namespace_digest, order.shard)
        layout = format_of(shard, self._setup, group=order.key.group)
        expected = self.payload(shard, order.key)
        at = order.offset + (0 if order.is_borrowed else layout.header_bytes)
        held = slab[at : at + layout.payload_bytes]
        if expected is not None and held != expected:
            self.accuse(f"{what}, left other bytes in its slot")
