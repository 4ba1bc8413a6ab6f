"""deploy/grafana/s3kv.json: the dashboard, from scripts/panels.py."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from scripts.panels import OWN_PRICES, ROWS, Panel

_WIDTH, _HEIGHT = 12, 8
"""Of a panel, on Grafana's grid, which is 24 wide."""
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def page() -> str:
    """The file, to be imported into Grafana 9 or later, or provisioned."""
    return json.dumps(_dashboard(), indent=2, ensure_ascii=False) + "\n"


def _dashboard() -> dict[str, Any]:
    return {
        "uid": "s3kv",
        "title": "s3kv",
        "description": "vLLM's KV cache and encoder outputs in S3. Metrics: docs/metrics.md.",
        "tags": ["vllm", "s3kv"],
        "timezone": "browser",
        "schemaVersion": 37,
        "version": 1,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": [*_variables()]},
        "panels": _panels(),
    }


def _variables() -> Iterator[dict[str, Any]]:
    yield {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
    }
    yield _choice("job")
    yield _choice("model", "model_name")
    for name, (label, value) in OWN_PRICES.items():
        yield {
            "name": name,
            "label": label,
            "type": "textbox",
            "query": value,
            "current": {"text": value, "value": value},
        }


def _choice(name: str, label: str = "") -> dict[str, Any]:
    query = f"label_values(vllm:s3kv_saves_total, {label or name})"
    return {
        "name": name,
        "label": name.capitalize(),
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def _panels() -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    y = 0
    for title, panels in ROWS.items():
        place = {"x": 0, "y": y, "w": 24, "h": 1}
        made.append({"id": len(made) + 1, "type": "row", "title": title, "gridPos": place})
        y += 1
        for number, panel in enumerate(panels):
            x, row = number % 2 * _WIDTH, number // 2
            place = {"x": x, "y": y + row * _HEIGHT, "w": _WIDTH, "h": _HEIGHT}
            made.append({"id": len(made) + 1, "gridPos": place} | _panel(panel))
        y += -(-len(panels) // 2) * _HEIGHT
    return made


def _panel(panel: Panel) -> dict[str, Any]:
    stacking = {"mode": "normal" if panel.stacked else "none", "group": "A"}
    custom = {"lineWidth": 1, "fillOpacity": 20 if panel.stacked else 8, "stacking": stacking}
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.doc,
        "datasource": _SOURCE,
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "min": 0, "custom": custom},
            "overrides": [],
        },
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {
                "refId": chr(ord("A") + number),
                "datasource": _SOURCE,
                "expr": query.expr,
                "legendFormat": query.legend,
            }
            for number, query in enumerate(panel.queries)
        ],
    }
