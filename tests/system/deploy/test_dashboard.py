"""The dashboard: what it asks for exists, and its first panel is net dollars an hour."""

from __future__ import annotations

import json
import re
from typing import Any

from s3kv.metrics import EC_METRICS, EC_NAMESPACE, KV_METRICS, NAMESPACE
from s3kv.prices import DEFAULT, TABLE
from tests.project import ROOT

BOARD: dict[str, Any] = json.loads((ROOT / "deploy/grafana/s3kv.json").read_text())
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
VARIABLES = {variable["name"]: variable for variable in BOARD["templating"]["list"]}


def test_every_metric_and_every_variable_exists() -> None:
    asked = " ".join(target["expr"] for panel in PANELS for target in panel["targets"])
    suffixes = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_count")}
    known = {
        namespace + name + suffix
        for namespace, table in ((NAMESPACE, KV_METRICS), (EC_NAMESPACE, EC_METRICS))
        for name, metric in table.items()
        for suffix in suffixes[metric.kind]
    }
    assert set(re.findall(rf"{NAMESPACE}\w+", asked)) <= known
    assert set(re.findall(r"\$(\w+)", asked)) <= {*VARIABLES, "__rate_interval"}


def test_no_panel_lies_on_another() -> None:
    corners = {(p["gridPos"]["x"], p["gridPos"]["y"]) for p in BOARD["panels"]}
    assert len(corners) == len(BOARD["panels"])


def worth(expr: str) -> float:
    """The value of the expression if each metric has one series, and these values and rates."""
    for name, value in (
        (r"rate\(vllm:s3kv_hit_tokens_bucket_total\{[^}]*\}\[\$__rate_interval\]\)", 16_000.0),
        (r"vllm:s3kv_prefill_tokens_per_s\{[^}]*\}", 8_000.0),
        (r"rate\(vllm:s3kv_cost_usd_total\{[^}]*\}\[\$__rate_interval\]\)", 0.001),
        (r"\$engine_dollars_per_hour", 4.0),
        (r"\$stored_gib", 7_300.0),
        (r"\$gib_month_dollars", 0.03),
        (r"\b(sum|vector)\b", ""),
    ):
        expr = re.sub(name, str(value), expr)
    assert re.fullmatch(r"[\d.e+*/() -]+", expr), expr
    return float(eval(expr))  # numbers and operators alone


def test_it_is_what_hits_spare_less_requests_and_storage() -> None:
    first = PANELS[0]
    assert first["title"] == "Net dollars an hour"
    assert first["fieldConfig"]["defaults"]["unit"] == "currencyUSD"
    asked = {target["legendFormat"]: target["expr"] for target in first["targets"]}
    told = {legend: worth(expr) for legend, expr in asked.items()}
    # Two engines for an hour; 0.001 dollars a second; 7,300 GiB at 3 cents in 730 hours.
    spared, requests, storage = 8.0, 3.6, 0.3
    net = {"net": spared - requests - storage}
    assert told == net | {"computing spared": spared, "requests": requests, "storage": storage}


def test_its_prices_are_the_operators() -> None:
    own = {name for name, variable in VARIABLES.items() if variable["type"] == "textbox"}
    assert own == {"engine_dollars_per_hour", "stored_gib", "gib_month_dollars"}
    assert float(VARIABLES["gib_month_dollars"]["query"]) == TABLE[DEFAULT].storage
