"""docs/metrics.md: every metric of the connectors and the tier, and the prices behind one."""

from __future__ import annotations

from collections.abc import Mapping

from s3kv.metrics import EC_METRICS, EC_NAMESPACE, KV_METRICS, NAMESPACE, TIER_METRICS, Metric
from s3kv.prices import AS_OF, SOURCE, TABLE, Prices
from scripts.marks import ROOT, filled, table


def page() -> str:
    """docs/metrics.md."""
    head = ["region and class", "1,000 PUT or LIST", "1,000 GET or HEAD", "DELETE"]
    head += ["a GiB read", "a GiB written"]
    prices = table(head, [(f"`{name}`", *_price(price)) for name, price in TABLE.items()])
    parts = {
        "kv": _table(NAMESPACE, KV_METRICS),
        "tier": _tier(),
        "ec": _table(EC_NAMESPACE, EC_METRICS),
        "prices": f"Prices of {AS_OF} (<{SOURCE}>):\n\n{prices}",
    }
    return filled(ROOT / "docs" / "metrics.md", parts)


def _table(namespace: str, metrics: Mapping[str, Metric]) -> str:
    rows = [_metric(namespace + name, metric) for name, metric in metrics.items()]
    return table(("metric", "labels", "meaning"), rows)


def _tier() -> str:
    """The differences to the table of the KV connector."""
    lacks = [f"`{name}`" for name in KV_METRICS if name not in TIER_METRICS]
    differing = {
        name: metric
        for name, metric in TIER_METRICS.items()
        if metric.doc != KV_METRICS[name].doc.replace(", per rank", "")
    }
    return (
        f"The tier lacks {', '.join(lacks[:-1])} and {lacks[-1]}. Some have another meaning:\n\n"
        + _table(NAMESPACE, differing)
    )


def _metric(name: str, metric: Metric) -> tuple[str, str, str]:
    suffix = "_total" if metric.kind == "counter" else ""
    labels = "; ".join(f"`{label}`: {', '.join(values)}" for label, values in metric.labels.items())
    kind = "" if metric.kind == "counter" else f" ({metric.kind})"
    return f"`{name}{suffix}`{kind}", labels, metric.doc


def _price(price: Prices) -> list[str]:
    each = (price.put, price.get, 0.0, price.retrieval, price.upload)
    return [f"${dollars:.6f}".rstrip("0").rstrip(".") for dollars in each]
