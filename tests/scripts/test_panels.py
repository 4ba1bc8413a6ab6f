"""The dashboard's first panel: net dollars an hour, at the operator's own prices."""

from __future__ import annotations

import json
import re

from s3kv.prices import DEFAULT, TABLE
from scripts.panels import OWN_PRICES, ROWS
from tests.project import ROOT

BOARD = json.loads((ROOT / "deploy/grafana/s3kv.json").read_text())


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
    first = next(panel for panel in BOARD["panels"] if panel["type"] != "row")
    assert first["title"] == next(iter(ROWS.values()))[0].title == "Net dollars an hour"
    assert first["fieldConfig"]["defaults"]["unit"] == "currencyUSD"
    asked = {target["legendFormat"]: target["expr"] for target in first["targets"]}
    told = {legend: worth(expr) for legend, expr in asked.items()}
    # Two engines for an hour; 0.001 dollars a second; 7,300 GiB at 3 cents in 730 hours.
    spared, requests, storage = 8.0, 3.6, 0.3
    net = {"net": spared - requests - storage}
    assert told == net | {"computing spared": spared, "requests": requests, "storage": storage}


def test_its_prices_are_the_operators() -> None:
    variables = {v["name"]: v for v in BOARD["templating"]["list"]}
    assert all(variables[name]["type"] == "textbox" for name in OWN_PRICES)
    assert float(variables["gib_month_dollars"]["query"]) == TABLE[DEFAULT].storage
