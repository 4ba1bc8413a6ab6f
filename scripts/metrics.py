"""docs/metrics.md: every metric of the connectors and the tier, and the prices behind one."""

from __future__ import annotations

from s3kv.metrics import EC_METRICS, EC_NAMESPACE, KV_METRICS, NAMESPACE, TIER_METRICS, Metric
from s3kv.prices import AS_OF, SOURCE, TABLE, Prices

_METRICS = """# Metrics

vLLM's own endpoint `/metrics` shows what s3kv counts: the KV connector as `vllm:s3kv_…`, the EC
connector as `vllm:s3kv_ec_…`, each with vLLM's labels `model_name` and
`engine`. The tables below are rendered from the one in `s3kv/metrics.py` that registers them.

Tiers and directions are in the names: **fetch** is bucket → host memory, **load** is host memory →
device, **save** is device → host memory, **upload** is host memory → bucket.

- Counters and histograms add up over all ranks of an engine. A chunk is fetched, saved and uploaded
  by every rank, so what is counted "per rank" counts it once for each. Of ranks that hold the same
  KV (latent attention), the first alone uploads. Gauges are the scheduler's: there is one of each
  per engine.
- Under `MultiConnector` nothing changes.
- All series are there from the start, with 0; those of the tier from the engine's first step on,
  and its histograms from their first value on.
- Numbers move with the engine's steps, and what an I/O process says of itself (`io_…`, `cost_usd`)
  once a second while there are steps: the metrics of an engine without requests stand still.
- A step in which nothing has happened hands nothing over.

`tests/contract/test_metrics.py` shows that nothing is counted twice on the way, and
`tests/system/e2e/test_prometheus.py` that a real Prometheus finds all of them on a real server.

## The dashboard

[deploy/grafana/s3kv.json](../deploy/grafana/s3kv.json) is for Grafana 9 and later (Dashboards,
Import), which has not seen it yet. It shows hits by tier and what they save, bandwidth and latency
by tier and direction, misses and losses by reason, host memory, the circuit breaker, requests and
what they cost, and the same for encoder outputs. Alarms on the same metrics are
[explained](operating.md#alarms) in the operating guide.
"""

_TIER = """## The tier

The [tier](tier.md) counts under the names of the KV connector, because an engine has one of them.
It moves the KV of all ranks at once, so nothing is counted per rank. vLLM owns host memory and the
copies to and from the GPU, and counts them itself (`vllm:kv_offload_…`). So the tier lacks {lacks}.

Some have another meaning:

| metric | labels | meaning |
|---|---|---|
{rows}
"""

_COST = """## What requests are taken to cost

`cost_usd` multiplies requests by Amazon's list prices of {as_of} (<{source}>): those of
the bucket's region if the table has them, those of us-east-1 for another region of AWS. Requests to
a store that is not AWS's cost nothing. Answers of class 5xx are not billed, those of class 4xx are.
Traffic between a bucket and machines in its region is free. Traffic out of the region, storage, and
requests of others (lifecycle rules, the command line) are not included. `s3kv cost` makes a bill of
all of them.

| region and class | 1,000 PUT or LIST | 1,000 GET or HEAD | DELETE | a GiB read | a GiB written |
|---|---|---|---|---|---|
{rows}
"""


def page() -> str:
    """The page."""
    sections = [_METRICS]
    for title, namespace, table in (
        ("The KV connector", NAMESPACE, KV_METRICS),
        ("The EC connector", EC_NAMESPACE, EC_METRICS),
    ):
        lines = [f"## {title}", "", "| metric | labels | meaning |", "|---|---|---|"]
        lines += [_metric(namespace + name, metric) for name, metric in table.items()]
        sections.append("\n".join(lines) + "\n")
    sections.insert(2, _tier())
    rows = "\n".join(f"| `{name}` | {_price(price)} |" for name, price in TABLE.items())
    sections.append(_COST.format(as_of=AS_OF, source=SOURCE, rows=rows))
    return "\n".join(sections)


def _tier() -> str:
    """The differences to the table of the KV connector."""
    lacks = [f"`{name}`" for name in KV_METRICS if name not in TIER_METRICS]
    rows = [
        _metric(NAMESPACE + name, metric)
        for name, metric in TIER_METRICS.items()
        if metric.doc != KV_METRICS[name].doc.replace(", per rank", "")
    ]
    return _TIER.format(lacks=f"{', '.join(lacks[:-1])} and {lacks[-1]}", rows="\n".join(rows))


def _metric(name: str, metric: Metric) -> str:
    suffix = "_total" if metric.kind == "counter" else ""
    labels = "; ".join(f"`{label}`: {', '.join(values)}" for label, values in metric.labels.items())
    kind = "" if metric.kind == "counter" else f" ({metric.kind})"
    return f"| `{name}{suffix}`{kind} | {labels} | {metric.doc} |"


def _price(price: Prices) -> str:
    each = (price.put, price.get, 0.0, price.retrieval, price.upload)
    return " | ".join(f"${dollars:.6f}".rstrip("0").rstrip(".") for dollars in each)
