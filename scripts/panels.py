"""The dashboard's panels: the title, the meaning and the queries of each.

scripts/dashboard.py makes Grafana's file of this table, and the tests put every query to a real
Prometheus.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from s3kv.prices import DEFAULT, TABLE

RATE = "$__rate_interval"
CHOSEN = 'job=~"$job",model_name=~"$model"'
TIERS = {
    "fetch": "fetch: bucket → host",
    "load": "load: host → device",
    "save": "save: device → host",
    "upload": "upload: host → bucket",
}


class Query(NamedTuple):
    """legend: as Grafana writes it, with {{label}} for a label's value."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """unit: Grafana's name for it. stacked: the values are parts of a whole."""

    title: str
    doc: str
    unit: str
    queries: tuple[Query, ...]
    stacked: bool = False


def metric(name: str, *labels: str, suffix: str = "_total") -> str:
    """Of the chosen jobs and models."""
    chosen = ",".join((CHOSEN, *labels))
    full = name if ":" in name else f"vllm:s3kv_{name}"
    return f"{full}{suffix}{{{chosen}}}"


def rate(name: str, *labels: str, by: str = "", suffix: str = "_total") -> str:
    """Per second, of all chosen engines together."""
    of = f" by ({by})" if by else ""
    return f"sum{of} (rate({metric(name, *labels, suffix=suffix)}[{RATE}]))"


def quantile(q: float, name: str) -> str:
    return f"histogram_quantile({q}, {rate(name, by='le', suffix='_bucket')})"


def rates(*names: str, prefix: str = "") -> tuple[Query, ...]:
    return tuple(Query(rate(prefix + name), name) for name in names)


def _bandwidth(prefix: str = "") -> tuple[Query, ...]:
    return tuple(Query(rate(f"{prefix}{op}_bytes"), legend) for op, legend in TIERS.items())


def _operations(prefix: str = "") -> tuple[Query, ...]:
    return tuple(
        Query(rate(f"{prefix}{op}_seconds", suffix="_count"), legend)
        for op, legend in TIERS.items()
    )


def _latency(prefix: str = "") -> tuple[Query, ...]:
    return tuple(
        Query(quantile(q, f"{prefix}{op}_seconds"), f"{op} p{q * 100:.0f}")
        for op in TIERS
        for q in (0.5, 0.99)
    )


def _memory(prefix: str = "") -> tuple[Query, ...]:
    held = metric(f"{prefix}slab_bytes", suffix="")
    pinned = metric(f"{prefix}slab_pinned_bytes", suffix="")
    return Query(f"sum by (state) ({held})", "{{state}}"), Query(f"sum ({pinned})", "pinned")


def _requests(prefix: str = "", title: str = "Requests") -> Panel:
    query = Query(rate(f"{prefix}io_requests", by="verb, status"), "{{verb}} {{status}}")
    doc = "Requests per second to the store, by verb and class of answer."
    return Panel(title, doc, "reqps", (query,))


def _misses(title: str, doc: str, prefix: str = "") -> Panel:
    return Panel(title, doc, "short", (Query(rate(f"{prefix}misses", by="reason"), "{{reason}}"),))


def _disk(prefix: str = "", title: str = "Disk") -> tuple[Panel, ...]:
    def queries(*names: str) -> tuple[Query, ...]:
        return tuple(Query(rate(f"{prefix}io_disk_{name}"), name) for name in names)

    return (
        Panel(
            f"{title}: objects",
            "Per second. reads: hits. dropped: not written, because the disk was behind, full or "
            "failing. corrupt: deleted. failed: the disk is not used for a minute.",
            "ops",
            queries("reads", "writes", "dropped", "corrupt", "failed"),
        ),
        Panel(
            f"{title}: bytes",
            "Read, written, and deleted for disk_bytes. Written bytes wear the disk.",
            "Bps",
            queries("read_bytes", "written_bytes", "evicted_bytes"),
        ),
    )


def _breaker(title: str, doc: str, prefix: str = "") -> Panel:
    states = Query(f"sum by (state) ({metric(f'{prefix}breaker', suffix='')})", "{{state}}")
    return Panel(title, doc, "short", (states,), stacked=True)


_TOKENS = rate("vllm:prompt_tokens")
_HIT = f"({rate('hit_tokens_bucket')} + {rate('hit_tokens_host')})"
_ROWS = f"({rate('ec_hit_rows')} + {rate('ec_encoded_rows')})"
_PER_ENGINE = " + ".join(
    f"rate({metric(name)}[{RATE}])" for name in ("hit_tokens_bucket", "hit_tokens_host")
)

OWN_PRICES = {
    "engine_dollars_per_hour": ("An engine, $ an hour", "3"),
    "stored_gib": ("The bucket, GiB", "4096"),
    "gib_month_dollars": ("A GiB, $ a month", f"{TABLE[DEFAULT].storage:g}"),
}
"""Variables of the dashboard that the operator sets, with their label and first value."""
_SPARED = (
    f"sum (rate({metric('hit_tokens_bucket')}[{RATE}]) / "
    f"{metric('prefill_tokens_per_s', suffix='')}) * $engine_dollars_per_hour"
)
_REQUESTS = f"{rate('cost_usd')} * 3600"
_STORAGE = "$stored_gib * $gib_month_dollars / 730"

SERVICE = (
    Panel(
        "Net dollars an hour",
        "What the bucket's hits spare of engines' time, at the measured prefill speed, less its "
        "requests and its storage. The price of an engine, the bucket's size and the price of a "
        "GiB are the dashboard's variables.",
        "currencyUSD",
        (
            Query(f"{_SPARED} - {_REQUESTS} - {_STORAGE}", "net"),
            Query(_SPARED, "computing spared"),
            Query(_REQUESTS, "requests"),
            Query(f"vector({_STORAGE})", "storage"),
        ),
    ),
    Panel(
        "Hit ratio by tier",
        "Share of all prompt tokens that were not computed, by the tier they came from.",
        "percentunit",
        (
            Query(f"{rate('vllm:prefix_cache_hits')} / {_TOKENS}", "device (vLLM's own cache)"),
            Query(f"{rate('hit_tokens_host')} / {_TOKENS}", "host memory"),
            Query(f"{rate('hit_tokens_bucket')} / {_TOKENS}", "bucket"),
        ),
        stacked=True,
    ),
    Panel(
        "Tokens not computed",
        "Prompt tokens per second that s3kv served instead of the engine computing them.",
        "short",
        (
            Query(rate("hit_tokens_bucket"), "from the bucket"),
            Query(rate("hit_tokens_host"), "from host memory"),
            Query(_TOKENS, "all prompt tokens"),
        ),
    ),
    Panel(
        "Prefill time saved",
        "Engine seconds per second that computing those tokens would take, at the measured prefill "
        "speed. 1 is one engine that needs not exist.",
        "short",
        (
            Query(
                f"sum (({_PER_ENGINE}) / {metric('prefill_tokens_per_s', suffix='')})",
                "engines saved",
            ),
        ),
    ),
    Panel(
        "Time to first token",
        "What users see, hits and misses together.",
        "s",
        tuple(
            Query(quantile(q, "vllm:time_to_first_token_seconds"), f"p{q * 100:.0f}")
            for q in (0.5, 0.95, 0.99)
        ),
    ),
)

TRANSFERS = (
    Panel("Bandwidth", "Bytes per second by tier and direction.", "Bps", _bandwidth()),
    Panel(
        "Latency",
        "Of transfers that succeeded. Loads and saves end when an engine step finds them done.",
        "s",
        _latency(),
    ),
    Panel("Operations", "Transfers that succeeded, per second.", "ops", _operations()),
    Panel(
        "Host memory",
        "What the slabs hold. Dirty is not in the bucket yet; pinned (part of clean and dirty) is "
        "in use by requests.",
        "bytes",
        _memory(),
    ),
)

LOSSES = (
    _misses(
        "Misses by reason",
        "Chunks wanted and not had, per second. known_absent is free: nobody was asked.",
    ),
    Panel(
        "Given up and dropped",
        "Waits cut short because computing was faster, and chunks that did not get to the bucket.",
        "short",
        (
            Query(rate("deadline_cuts"), "waits cut short"),
            Query(rate("saves_dropped", by="reason"), "saves dropped: {{reason}}"),
            Query(rate("uploads_given_up"), "uploads given up"),
            Query(rate("evictions"), "evictions"),
        ),
    ),
    Panel(
        "Errors",
        "All of them cost hits, none an answer. See the operating guide for each.",
        "short",
        rates(
            "fetch_corrupt",
            "fetch_denied",
            "fetch_failed",
            "upload_denied",
            "upload_failed",
            "save_failed",
            "loads_failed",
            "io_restarts",
            "io_defects",
            "internal_errors",
        ),
    ),
    _breaker(
        "Circuit breaker", "Engines whose breaker is in each state. Open: the bucket is not asked."
    ),
)

STORE = (
    _requests(),
    Panel(
        "Pacing",
        "How the client adapts: throttling answers, smaller windows, retries, second requests.",
        "short",
        rates("io_throttled", "io_window_cuts", "io_retries", "io_hedges", "io_hedges_won"),
    ),
    Panel(
        "Dollars a day",
        "What the requests cost at this rate, at AWS's prices of the bucket's region.",
        "currencyUSD",
        (Query(f"{rate('cost_usd')} * 86400", "KV"), Query(f"{rate('ec_cost_usd')} * 86400", "EC")),
    ),
    Panel(
        "Dollars per million tokens not computed",
        "The same, over the tokens the bucket and host memory served.",
        "currencyUSD",
        (Query(f"{rate('cost_usd')} / {_HIT} * 1e6", "KV"),),
    ),
    Panel(
        "Stored share of compressed chunks",
        "Bytes on the wire per byte decoded, of the chunks that are fetched (compress).",
        "percentunit",
        (Query(f"{rate('io_decoded_stored_bytes')} / {rate('io_decoded_bytes')}", "fetched"),),
    ),
)

DISK = _disk()

ENCODER = (
    Panel(
        "Encoder outputs: hit ratio by tier",
        "Share of embeddings that were loaded instead of encoded.",
        "percentunit",
        (
            Query(f"{rate('ec_hit_rows_host')} / {_ROWS}", "host memory"),
            Query(f"{rate('ec_hit_rows_bucket')} / {_ROWS}", "bucket"),
        ),
        stacked=True,
    ),
    Panel(
        "Encoder outputs: bandwidth",
        "Bytes per second by tier and direction.",
        "Bps",
        _bandwidth("ec_"),
    ),
    Panel("Encoder outputs: latency", "Of transfers that succeeded.", "s", _latency("ec_")),
    Panel("Encoder outputs: host memory", "What the slab holds.", "bytes", _memory("ec_")),
    _misses("Encoder outputs: misses by reason", "Items wanted and not had, per second.", "ec_"),
    Panel(
        "Encoder outputs: losses and errors",
        "Items not saved, waits cut short, and what failed.",
        "short",
        rates(
            "deadline_cuts",
            "saves_dropped",
            "saves_unfit",
            "items_too_large",
            "fetch_corrupt",
            "fetch_denied",
            "fetch_failed",
            "upload_denied",
            "upload_failed",
            "io_restarts",
            "internal_errors",
            prefix="ec_",
        ),
    ),
    _requests("ec_", "Encoder outputs: requests"),
    _breaker("Encoder outputs: circuit breaker", "Engines whose breaker is in each state.", "ec_"),
    *_disk("ec_", "Encoder outputs: disk"),
)

ROWS: dict[str, tuple[Panel, ...]] = {
    "Is it worth it": SERVICE,
    "Tiers": TRANSFERS,
    "Misses and losses": LOSSES,
    "The disk (disk_path)": DISK,
    "The store and its bill": STORE,
    "Encoder outputs": ENCODER,
}
