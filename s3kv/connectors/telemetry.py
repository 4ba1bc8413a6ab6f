"""Telemetry of one side of a connector: its counters, gauges and log lines after a step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from s3kv.connectors.log import TrafficLine
from s3kv.connectors.metrics import Values, add
from s3kv.metrics import MISSES, TIER_UNSAVED, UNSAVED, Metric
from s3kv.planning.breaker import BreakerState
from s3kv.types import Outcome, Tally

if TYPE_CHECKING:
    from s3kv.planning.ledger import Ledger
    from s3kv.planning.offload import OffloadPlanner

logger = logging.getLogger("s3kv")

Shares = Mapping[str, tuple[tuple[str, int], ...]]
"""By counter: the keys of the metrics that it is part of, each with a sign."""

_MISSED: Shares = {name: ((name, 1), (f"misses|{reason}", 1)) for name, reason in MISSES.items()}
_DROPPED = "saves_dropped|inflight"


def _dropped(reasons: Mapping[str, str]) -> Shares:
    """Shares of dropped saves; those without another reason are "inflight"."""
    return {
        "saves_dropped": ((_DROPPED, 1),),
        **{name: ((_DROPPED, -1), (f"saves_dropped|{why}", 1)) for name, why in reasons.items()},
    }


EC_SHARES: Shares = {**_MISSED, "saves_dropped": (("saves_dropped|memory_full", 1),)}
KV_SHARES: Shares = {
    **_MISSED,
    # The ranks count and report these; the planner counts misses.
    **{f"fetch_{o.name.lower()}": _MISSED.get(f"fetch_{o.name.lower()}", ())[1:] for o in Outcome},
    **{f"upload_{o.name.lower()}": () for o in Outcome},
    "saves_failed": (),
    **_dropped(UNSAVED),
}
TIER_SHARES: Shares = {**_MISSED, **_dropped(TIER_UNSAVED)}
"""The planners' counters, mapped to the keys of the metrics."""


class Meter:
    """Meter of sets of counters: measures their growth between calls.
    shares: for counters that the table has under another name, or that are part of several
        metrics, or of none. A counter that is neither there nor in the table is left out, and
        logged as an error."""

    def __init__(self, metrics: Mapping[str, Metric], shares: Shares | None = None) -> None:
        keys = (key for name, metric in metrics.items() for key in metric.keys(name))
        self._shares = {key: ((key, 1),) for key in keys} | dict(shares or {})
        self._seen: dict[int, tuple[Tally, int, dict[str, int]]] = {}

    def grown(self, *sets: Tally) -> Values:
        """The growth of each set since the last call; a set that replaces another at its position
        counts in full. An unchanged set costs two comparisons, because this is called in every
        step."""
        grown: Values = {}
        for place, counters in enumerate(sets):
            known, version, seen = self._seen.get(place, (None, 0, {}))
            if known is not counters:
                version, seen = 0, {}
            if counters.version != version:
                self._seen[place] = counters, counters.version, seen
                for name, value in counters.items() - seen.items():
                    self._share(grown, name, value - seen.get(name, 0))
                    seen[name] = value
        return grown and {key: value for key, value in grown.items() if value}

    def _share(self, grown: Values, name: str, more: int) -> None:
        if name not in self._shares:
            self._shares[name] = ()
            logger.error("s3kv has no metric for its counter %r: please report this bug", name)
        for key, sign in self._shares[name]:
            grown[key] = grown.get(key, 0) + sign * more


class Telemetry:
    """Telemetry of a scheduler's side. Used from the engine's thread.
    metrics, shares: as for `Meter`. traffic: the line on traffic."""

    def __init__(self, metrics: Mapping[str, Metric], shares: Shares, traffic: TrafficLine) -> None:
        self.is_stale = True
        """Whether the gauges may have changed since they were last read."""
        self.seconds: Values = {}
        """Durations since the last call of `take`, by histogram."""
        self._metrics = metrics
        self._meter = Meter(metrics, shares)
        self._gauges: Values = {}
        self._traffic = traffic

    def take(self, gauges: Callable[[], Values], *counters: Tally) -> Values:
        """The growth of the counters, the durations, and the gauges that have changed, since the
        last call. gauges: reads them all; called only if something may have changed."""
        values = self._meter.grown(*counters)
        if self.seconds:
            values |= self.seconds
            self.seconds = {}
        if values or self.is_stale:
            self.is_stale = False
            changed = {k: v for k, v in gauges().items() if self._gauges.get(k) != v}
            self._gauges |= changed
            values |= changed
        return values

    def add_seconds(self, seconds: Mapping[str, list[float]]) -> None:
        add(self.seconds, seconds, self._metrics)

    def log(
        self, planner: Ledger | OffloadPlanner, now_s: float, *, finished: bool = False
    ) -> None:
        """Log the line on traffic, if one is due. finished: whether a request has just finished."""
        line = self._traffic.line(planner.counters, planner.breaker.state, now_s, finished=finished)
        if line is not None:
            logger.info("%s", line)


def host_gauges(ledger: Ledger, unit_bytes: int) -> Values:
    """The gauges that both schedulers have. unit_bytes: host memory behind one unit of the table,
    on all ranks together."""
    held, now = ledger.table.statistics(), ledger.breaker.state
    units = {"free": held.free, "filling": held.reserved, "clean": held.clean, "dirty": held.dirty}
    return {
        **{f"slab_bytes|{state}": number * unit_bytes for state, number in units.items()},
        "slab_pinned_bytes": held.pinned * unit_bytes,
        **{f"breaker|{state.value}": int(state is now) for state in BreakerState},
    }
