"""docs/pictures/dashboard.svg: the dashboard's queries over a real run, drawn without Grafana.

    python -m scripts.dashboard_picture        about three minutes; needs vLLM and Prometheus

Two engines, the second with an empty cache of its own, are asked the same prompts over and over in
waves, while a Prometheus of our own watches them. Then every query is put to it for the whole time,
as Grafana would, and its answer drawn. The encoder's panels are left out: nothing is encoded.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab import models
from lab.engine import Engine
from lab.prometheus import Prometheus, prometheus
from lab.s3 import S3Server, moto_process
from scripts import svg
from scripts.panels import ENCODER, ROWS, Panel

PICTURE = Path(__file__).resolve().parent.parent / "docs/pictures/dashboard.svg"
COLORS = ("#0969da", "#1a7f37", "#9a6700", "#cf222e", "#8250df", "#57606a", "#bc4c00", "#1b7c83")
WIDTH, HEIGHT, MARGIN = 470, 210, 14
SECONDS = 60
STEP_S = 1.0
PROMPTS = models.prompts(12, 1_600, seed=1)
FRESH = models.prompts(400, 1_600, seed=2)
KV_CACHE_BYTES = 300 * 2**20
"""Holds two prompts, so that the others are asked of host memory and the bucket."""


@dataclass(frozen=True, slots=True)
class Line:
    """points: (seconds since the start, value)."""

    name: str
    points: list[tuple[float, float]]


def connector(server: S3Server) -> dict[str, Any]:
    return {
        "kv_connector": "S3KVConnector",
        "kv_connector_module_path": "s3kv.connectors",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "bucket": "demo",
            "endpoint_url": server.url,
            "host_bytes": "640MiB",
            "recompute_gate": False,
            "prices": "us-east-1/standard",
        },
    }


@contextmanager
def engine(model: Path, server: S3Server, home: Path, name: str) -> Iterator[Engine]:
    with Engine(
        model,
        connector=connector(server),
        env=server.env,
        log_path=home / f"{name}.log",
        kv_cache_memory_bytes=KV_CACHE_BYTES,
    ) as started:
        yield started


def run(home: Path) -> dict[str, list[Line]]:
    """The answers to every query, by panel."""
    model = models.build(home, models.FAT)
    with moto_process() as server:
        server.client().create_bucket(Bucket="demo")
        with engine(model, server, home, "first") as first:
            first.generate(PROMPTS)
        with (
            engine(model, server, home, "second") as second,
            prometheus({"vllm": f"127.0.0.1:{second.call('lab.exposition:serve')}"}, home) as seen,
        ):
            begin_s = time.time()  # noqa: TID251 - Prometheus asks for wall time
            ask_in_waves(second)
            end_s = time.time()  # noqa: TID251
            return answers(seen, begin_s, end_s)


def ask_in_waves(asked: Engine) -> None:
    """Known prompts, some new ones among them, more and fewer at a time."""
    until_s = time.monotonic() + SECONDS
    number = 0
    while time.monotonic() < until_s:
        known = [PROMPTS[(number + i) % len(PROMPTS)] for i in range(1 + number % 3)]
        asked.generate([*known, FRESH[number % len(FRESH)]] if number % 2 else known)
        number += 1


def answers(seen: Prometheus, begin_s: float, end_s: float) -> dict[str, list[Line]]:
    drawn: dict[str, list[Line]] = {}
    for panel in (panel for row in ROWS.values() for panel in row if panel not in ENCODER):
        lines = drawn.setdefault(panel.title, [])
        for query in panel.queries:
            expr = query.expr.replace("$__rate_interval", "10s")
            expr = expr.replace("$job", ".*").replace("$model", ".*")
            for series in seen.query_range(expr, start_s=begin_s, end_s=end_s, step_s=STEP_S):
                name = query.legend
                for label, value in series["metric"].items():
                    name = name.replace(f"{{{{{label}}}}}", value)
                points = [(float(at) - begin_s, float(value)) for at, value in series["values"]]
                lines.append(Line(name, [p for p in points if p[1] == p[1]]))
    return drawn


def draw(drawn: dict[str, list[Line]]) -> str:
    panels = [panel for row in ROWS.values() for panel in row if panel.title in drawn]
    elements = [
        chart(panel, drawn[panel.title], i % 2 * (WIDTH + MARGIN), i // 2 * (HEIGHT + MARGIN))
        for i, panel in enumerate(panels)
    ]
    rows = -(-len(panels) // 2)
    return svg.document(
        2 * WIDTH + MARGIN, rows * (HEIGHT + MARGIN), "The dashboard over one minute", *elements
    )


def chart(panel: Panel, lines: Sequence[Line], x: float, y: float) -> str:
    """One panel: title, grid, lines, and the names of those that are not 0 throughout."""
    left, top, width, height = x + 62, y + 30, WIDTH - 76, HEIGHT - 84
    alive = [line for line in lines if any(value for _, value in line.points)]
    high = max((value for line in alive for _, value in line.points), default=0.0) or 1.0
    parts = [svg.words(x + 10, y + 14, panel.title, anchor="start", size=14)]
    for part in (0.0, 0.5, 1.0):
        at = top + height * (1 - part)
        parts.append(
            f"<path d='M{left:g} {at:g}h{width:g}' stroke='{svg.GREY}' stroke-width='0.6'/>"
        )
        said = readable(high * part, panel.unit)
        parts.append(svg.words(left - 6, at, said, anchor="end", size=10, color=svg.SOFT))
    for number, line in enumerate(alive):
        color = COLORS[number % len(COLORS)]
        path = " ".join(
            f"{left + at / SECONDS * width:.1f},{top + height * (1 - value / high):.1f}"
            for at, value in line.points
            if at <= SECONDS
        )
        parts.append(f"<polyline points='{path}' fill='none' stroke='{color}' stroke-width='1.4'/>")
    parts.append(names(alive, x + 10, top + height + 16))
    return "\n".join(parts)


def names(lines: Sequence[Line], x: float, y: float) -> str:
    parts, at, row = [], 0.0, 0
    for number, line in enumerate(lines):
        width = len(line.name) * 5.8 + 22
        if at + width > WIDTH - 12:
            at, row = 0.0, row + 1
        color = COLORS[number % len(COLORS)]
        parts.append(svg.bar(x + at, y + row * 14 - 3, 10, 6, color))
        parts.append(
            svg.words(x + at + 14, y + row * 14, line.name, anchor="start", size=10, color=svg.SOFT)
        )
        at += width
    if not lines:
        parts.append(svg.words(x, y, "0 throughout", anchor="start", size=10, color=svg.SOFT))
    return "\n".join(parts)


def readable(value: float, unit: str) -> str:
    if unit == "percentunit":
        return f"{value:.0%}"
    if unit == "s":
        return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            short = f"{value / size:.3g} {letter}"
            break
    else:
        short = f"{value:.3g} "
    suffix = {"Bps": "B/s", "bytes": "B", "reqps": "/s", "ops": "/s", "currencyUSD": "$"}
    return (short + suffix.get(unit, "")).strip()


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="s3kv-dashboard-") as home:
        PICTURE.write_text(draw(run(Path(home))))


if __name__ == "__main__":
    main()
