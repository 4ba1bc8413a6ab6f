"""A trace scaled to more or fewer replicas, and a sample of them.

The trace is taken for the traffic of ten replicas. Of fewer, a part of its conversations is kept;
for more there are copies of it, with other conversations behind the same system prompt, each begun
up to a minute later. So the load of a replica stays the same, and so does what a conversation can
reuse.

Of a large fleet a sample is simulated. The requests of the others to the same conversations count
as done: their chunks are in the bucket when a request of the sample would have had them there.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

from benchmarks.simulation.workload import Arrival

TRACE_REPLICAS = 10
_SPREAD_S = 60.0

Routing = Literal["session", "round-robin"]


@dataclass(frozen=True, slots=True)
class Load:
    """own: requests of the sampled replicas, with the replica of each, by time. others: requests of
    other replicas to conversations that the sample has a part in."""

    own: Sequence[tuple[int, Arrival]]
    others: Sequence[Arrival]


def scaled(
    arrivals: Sequence[Arrival], replicas: int, sampled: int, routing: Routing, seed: int
) -> Load:
    """The load of the first `sampled` of `replicas`."""
    rng = random.Random(f"{seed} scaled")
    copies = max(1, replicas // TRACE_REPLICAS)
    share = min(1.0, replicas / TRACE_REPLICAS)
    placed: list[tuple[float, int, Arrival]] = []
    shifts_s: dict[tuple[int, int], float] = {}
    for copy in range(copies):
        for arrival in arrivals:
            if share < 1 and _uniform(0, arrival.session) >= share:
                continue
            mine = (copy, arrival.session)
            if mine not in shifts_s:
                shifts_s[mine] = rng.uniform(0.0, _SPREAD_S) if copy else 0.0
            placed.append((arrival.time_s + shifts_s[mine], copy, arrival))
    placed.sort(key=lambda one: (one[0], one[1], one[2].number))
    places = [
        number % replicas
        if routing == "round-robin"
        else int(replicas * _uniform(1 + copy, arrival.session))
        for number, (_, copy, arrival) in enumerate(placed)
    ]
    seen = {
        (copy, arrival.session)
        for place, (_, copy, arrival) in zip(places, placed, strict=True)
        if place < sampled
    }
    own: list[tuple[int, Arrival]] = []
    others: list[Arrival] = []
    for number, (place, (time_s, copy, arrival)) in enumerate(zip(places, placed, strict=True)):
        if (copy, arrival.session) not in seen:
            continue
        made = Arrival(
            number,
            time_s,
            arrival.prompt_tokens,
            arrival.output_tokens,
            _hashes(arrival, copy),
            arrival.session,
        )
        if place < sampled:
            own.append((place, made))
        else:
            others.append(made)
    return Load(own, others)


def _uniform(salt: int, session: int) -> float:
    """A number below 1 that depends on the conversation alone."""
    mixed = f"{salt} {session}".encode()
    return int.from_bytes(blake2b(mixed, digest_size=6).digest(), "little") / 2**48


def _hashes(arrival: Arrival, copy: int) -> tuple[bytes, ...]:
    """The first chunk is the system prompt, which all copies share."""
    if not copy:
        return arrival.hashes
    salt = copy.to_bytes(4, "little")
    first, *rest = arrival.hashes or (b"",)
    own = (blake2b(one, digest_size=32, salt=salt).digest() for one in rest)
    return (first, *own) if arrival.hashes else ()
