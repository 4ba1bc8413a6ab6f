"""How the bucket behaves for a while: how long its answers take and what becomes of requests."""

from __future__ import annotations

import random
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Weather:
    """latency_s: least and most, drawn with a bias to the least. get, put: the weights of what
    becomes of a request. A hang ends with the client's own timeout; a defect is an exception that
    no store should raise. The client notices a body that is cut, and neither another length nor a
    flipped bit nor another object (swap). A PUT that is lost is written; its answer is lost."""

    name: str
    latency_s: tuple[float, float]
    get: dict[str, float] = field(default_factory=lambda: {"ok": 1.0})
    put: dict[str, float] = field(default_factory=lambda: {"ok": 1.0})

    def latency(self, rng: random.Random) -> float:
        low, high = self.latency_s
        return low + (high - low) * rng.random() ** 3

    def fate(self, direction: str, rng: random.Random) -> str:
        weights = self.get if direction == "get" else self.put
        if len(weights) == 1:
            return next(iter(weights))
        (fate,) = rng.choices([*weights], [*weights.values()])
        return fate


CALM = Weather("calm", (0.002, 0.05))
CLEAR = Weather("clear", CALM.latency_s)
"""At the end of a run, when no processor is busy either."""
SLOW = Weather("slow", (0.3, 6.0))
FLAKY = Weather(
    "flaky",
    (0.005, 0.5),
    {"ok": 6, "unavailable": 2, "throttled": 1, "cut": 2, "hang": 0.3, "defect": 0.3},
    {"ok": 5, "unavailable": 2, "throttled": 1, "lost": 3, "hang": 0.3, "defect": 0.3},
)
ROTTEN = Weather(
    "rotten", (0.002, 0.1), {"ok": 3, "cut": 1, "short": 1, "long": 1, "flip": 2, "swap": 2}
)
OUTAGE = Weather(
    "outage", (0.001, 2.0), {"unavailable": 4, "hang": 1}, {"unavailable": 3, "hang": 1, "lost": 1}
)
DENIED = Weather("denied", (0.002, 0.05), {"denied": 1}, {"denied": 1})
READ_ONLY = Weather("read-only", (0.002, 0.05), {"ok": 1}, {"denied": 1})
NO_BUCKET = Weather("no bucket", (0.002, 0.05), {"no bucket": 1}, {"no bucket": 1})

FORECAST = (
    (CALM, 4),
    (SLOW, 2),
    (FLAKY, 4),
    (ROTTEN, 3),
    (OUTAGE, 1),
    (DENIED, 1),
    (READ_ONLY, 0.5),
    (NO_BUCKET, 0.5),
)


def draw(rng: random.Random) -> Weather:
    (weather,) = rng.choices([w for w, _ in FORECAST], [p for _, p in FORECAST])
    return weather
