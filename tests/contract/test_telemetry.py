"""The counters of both connectors: every one has a metric, and each is handed over once."""

from __future__ import annotations

import ast
import logging
from collections.abc import Iterator

import pytest

from s3kv.connectors.log import PromptTraffic
from s3kv.connectors.telemetry import EC_SHARES, KV_SHARES, TIER_SHARES, Meter, Telemetry
from s3kv.metrics import EC_METRICS, KV_METRICS, TIER_METRICS
from s3kv.objects.compression import PLAIN_REASONS
from s3kv.types import Outcome, Tally
from tests.project import ROOT

FETCH_ENDS = {f"fetch_{o.name.lower()}" for o in Outcome if o is not Outcome.EXISTS}
NO_UPLOADS = (Outcome.MISSING, Outcome.CORRUPT)
UPLOAD_ENDS = {f"upload_{o.name.lower()}" for o in Outcome if o not in NO_UPLOADS}
CORRUPT = {name for name in KV_METRICS if name.startswith("fetch_corrupt_")}
COMPOSED = {
    "fetch_{outcome.name.lower()}": FETCH_ENDS,
    "upload_{outcome.name.lower()}": UPLOAD_ENDS,
    "upload_{end.outcome.name.lower()}": UPLOAD_ENDS,
    "{kind}_{end.outcome.name.lower()}": FETCH_ENDS | UPLOAD_ENDS | {"save_ok", "save_failed"},
    "{kind}_bytes": {"fetch_bytes", "save_bytes", "upload_bytes"},
    "{done.kind.value}_corrupt_{done.reason}": CORRUPT,
    "fetch_corrupt_{done.reason}": CORRUPT,
    "{end.kind.value}_{outcome.name.lower()}": FETCH_ENDS | UPLOAD_ENDS,
    "{end.kind.value}_bytes": {"fetch_bytes", "upload_bytes"},
    "fetch_corrupt_{end.reason}": CORRUPT,
    "hit_rows_{tier}": {"hit_rows_bucket", "hit_rows_host"},
    "io_left_plain|{why}": {f"io_left_plain|{why}" for why in PLAIN_REASONS},
}
"""Names of counters that the sources compose: the expression, and its values."""
PASSED_ON = {"name", "counter", "ends.counters", "io - self._io_reported", "report.counters"}
"""Counters that a module passes on under the names that another one has given them."""
IO = (
    *("io/client.py", "io/server/service.py", "io/sources/compressing.py", "io/sources/disk.py"),
    *("io/sources/reception.py", "upkeep/housekeeping.py"),
)
OF_REQUESTS = ("connectors/request_params.py", "planning/deadline.py")
COUNTING = {
    "KV planner": (
        *("planning/ledger.py", "planning/kv.py", "planning/lookup.py", "planning/saves.py"),
        *("connectors/kv_scheduler.py", "connectors/request_hashes.py", *OF_REQUESTS),
    ),
    "KV rank": ("worker/rank.py", "connectors/kv_worker.py", *IO),
    "EC": (
        *("planning/deadline.py", "planning/ledger.py", "planning/ec.py", "worker/outbox.py"),
        *("connectors/ec_scheduler.py", "connectors/ec_worker.py", *IO),
    ),
    "tier": (*OF_REQUESTS, "planning/offload.py", "connectors/offload_tier.py", *IO),
}
"""The modules that count for each meter."""
METERS = {
    "KV planner": Meter(KV_METRICS, KV_SHARES),
    "KV rank": Meter(KV_METRICS),
    "EC": Meter(EC_METRICS, EC_SHARES),
    "tier": Meter(TIER_METRICS, TIER_SHARES),
}
NOT_OF_ITEMS = {
    *("saves_believed_present", "saves_failed", "saves_without_room"),
    *("uploads_again", "uploads_given_up"),
}
"""Counters of the ledger's saves. The EC connector's items are saved without the ledger."""


def names_of(key: ast.expr) -> set[str]:
    if isinstance(key, ast.Constant):
        return {str(key.value)}
    if isinstance(key, ast.JoinedStr):
        return COMPOSED[ast.unparse(key)[2:-1]]
    assert ast.unparse(key) in PASSED_ON, f"which counters are these: {ast.unparse(key)}"
    return set()


def keys_counted(source: str) -> Iterator[ast.expr]:
    """The keys under which a module counts, as its source has them."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.AugAssign(target=ast.Subscript(value=counters, slice=key)):
                found: list[ast.expr | None] = [key]
            case ast.Assign(targets=[ast.Subscript(value=counters, slice=key)]):
                found = [key]
            case ast.Call(func=ast.Attribute(value=counters, attr="update"), args=[more]):
                found = [*more.keys] if isinstance(more, ast.Dict) else [more]
            case ast.Assign(targets=[counters], value=ast.Dict(keys=keys)):
                found = [*keys]
            case ast.AugAssign(target=counters, value=ast.DictComp(key=key)):
                found = [key]
            case _:
                continue
        if ast.unparse(counters).endswith("counters"):
            yield from (key for key in found if key is not None)


@pytest.mark.parametrize("who", COUNTING)
def test_every_counter_has_a_metric(who: str, caplog: pytest.LogCaptureFixture) -> None:
    sources = [(ROOT / "s3kv" / path).read_text() for path in COUNTING[who]]
    names = {name for text in sources for key in keys_counted(text) for name in names_of(key)}
    names -= NOT_OF_ITEMS if who == "EC" else set()
    assert len(names) > 15
    METERS[who].grown(Tally({name: 1 for name in names}))
    assert caplog.text == ""


def test_every_module_that_counts_for_a_connector_is_known() -> None:
    counting = {
        str(path.relative_to(ROOT / "s3kv"))
        for path in (ROOT / "s3kv").rglob("*.py")
        if any(True for _ in keys_counted(path.read_text()))
    }
    known = {path for paths in COUNTING.values() for path in paths} | {"messages.py"}
    unknown = {path for path in counting - known if not path.startswith("library/")}
    assert not unknown, "the library has no metrics, everything else has"


def test_a_counter_without_a_metric_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    meter = Meter(KV_METRICS, KV_SHARES)
    counters = Tally(fetch_queue_full=5, saves=1)
    assert meter.grown(counters) == {"saves": 1}
    counters.update(fetch_queue_full=1, saves=1)
    assert meter.grown(counters) == {"saves": 1}
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert "fetch_queue_full" in record.getMessage()


def test_counters_are_handed_over_once() -> None:
    """All of them, if a planner replaces another, as that of a late handshake does."""
    meter = Meter(KV_METRICS)
    counters, others = Tally(saves=2, evictions=0), Tally(saves=3)
    for now, grown in ((counters, 2), (counters, 0), (others, 3), (others, 0)):
        assert meter.grown(now) == ({"saves": grown} if grown else {})
    others["saves"] += 1
    assert meter.grown(others) == {"saves": 1}


def test_a_counter_can_be_part_of_several_metrics() -> None:
    meter = Meter(KV_METRICS, KV_SHARES)
    counters = Tally(saves_dropped=5, saves_without_room=2, fetches_spared=3, fetch_missing=4)
    assert meter.grown(counters) == {
        "saves_dropped|inflight": 3,
        "saves_dropped|memory_full": 2,
        "fetches_spared": 3,
        "misses|known_absent": 3,
        "misses|absent": 4,
    }
    counters.update(saves_dropped=1, saves_without_room=1, fetch_bytes=2, fetch_ok=2)
    assert meter.grown(counters) == {"saves_dropped|memory_full": 1, "fetch_bytes": 2}, (
        "the ranks report how fetches end"
    )


def test_gauges_are_read_when_they_may_have_changed_and_handed_over_when_they_have() -> None:
    telemetry, counters = Telemetry(KV_METRICS, KV_SHARES, PromptTraffic()), Tally()
    first, second = ({"slab_bytes|free": free, "slab_bytes|dirty": 8 - free} for free in (8, 4))
    for now, handed_over in ((first, first), (first, {}), (second, second)):
        telemetry.is_stale = True
        assert telemetry.take(now.copy, counters) == handed_over
        assert telemetry.take(dict, counters) == {}
