"""HTML page of a report: one file with style and charts, and no external resources. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

from s3kv.config import size
from s3kv.prove.report import margins_text

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:62rem;
padding:0 1rem;color:#1b1f24}
h1{font-size:1.4rem;padding:.7rem 1rem;border-radius:.4rem;color:#fff}
h1.yes{background:#1a7f37}h1.no{background:#b42318}h2{font-size:1.05rem;margin-top:2rem}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
td,th{padding:.25rem .7rem;text-align:right;border-bottom:1px solid #d8dee4}
td:first-child,th:first-child{text-align:left}.wrong{color:#b42318;font-weight:600}
svg text{font:12px system-ui,sans-serif;fill:#1b1f24}
"""
_COLOURS = ("#1f6feb", "#8250df", "#d0d7de")
_WIDTH, _LEFT, _BAR, _GAP = 760, 90, 18, 10
Bars = Sequence[tuple[str, Sequence[float]]]
"""For each arm, its name and the lengths of its bars."""

COLUMNS = (
    *("arm", "codes found", "same tokens", "logprobs moved", "TTFT p50", "TTFT p95", "served by"),
    *("read", "written", "requests", "US$", "CPU s"),
)


def cells(name: str, row: Mapping[str, Any]) -> tuple[str, ...]:
    """The row of an arm in the table, below `COLUMNS`."""
    answers = row["answers"]
    share = {
        source: row[f"{source}_tokens"] / max(1, row["prompt_tokens"])
        for source in ("engine", "connector")
    }
    served = ", ".join(f"{source} {part:.0%}" for source, part in share.items() if part)
    return (
        name,
        f"{row['found']}/{answers}",
        "-" if row["same_tokens"] is None else f"{row['same_tokens']}/{answers}",
        "-" if row["move"] is None else f"{row['move']:.3f}",
        f"{row['ttft_p50_ms']:,.0f} ms",
        f"{row['ttft_p95_ms']:,.0f} ms",
        served or "none",
        size(row["read_bytes"]),
        size(row["written_bytes"]),
        f"{row['requests']:,}",
        f"{row['usd']:.6f}",
        f"{row['cpu_s']:.1f}",
    )


def html(report: Mapping[str, Any]) -> str:
    """The page."""
    arms = report["arms"]
    ttft = [(name, (row["ttft_p50_ms"], row["ttft_p95_ms"])) for name, row in arms.items()]
    sources = ("engine_tokens", "connector_tokens", "computed_tokens")
    hits = [(name, [row[source] for source in sources]) for name, row in arms.items()]
    moves = [(name, [row["move"]]) for name, row in arms.items() if row["move"] is not None]
    findings = "".join(
        f'<li class="{"wrong" if one["failed"] else ""}">{escape(one["arm"])}: '
        f"<span style='white-space:pre-wrap'>{escape(one['text'])}</span></li>"
        for one in report["findings"]
    )
    skipped = "".join(f"<li>{escape(text)}</li>" for text in report["skipped"])
    return "".join(
        (
            '<!doctype html><html lang="en"><meta charset="utf-8"><title>s3kv prove</title>',
            f"<style>{_STYLE}</style>",
            f'<h1 class="{"yes" if report["proven"] else "no"}">{escape(report["verdict"])}</h1>',
            f"<p>{escape(report['model'])}, seed {report['seed']}, s3kv {report['s3kv']}. ",
            f"{escape(margins_text(report))}</p>",
            f"<ul>{findings}{skipped}</ul>",
            _table(COLUMNS, (cells(name, row) for name, row in arms.items())),
            "<h2>Time to first token: p50 and p95, ms</h2>",
            _chart(ttft, stacked=False),
            "<h2>Prompt tokens: engine's prefix cache, connector, computed</h2>",
            _chart(hits, stacked=True),
            "<h2>Largest move of logprobs, nats; the line is the margin</h2>",
            _chart(moves, stacked=False, mark=report["margins"]["move"], digits=3),
            "</html>\n",
        )
    )


def _table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def _chart(bars: Bars, *, stacked: bool, mark: float | None = None, digits: int = 0) -> str:
    """Horizontal bars. mark: a value at which to draw a line."""
    lengths = [sum(values) if stacked else max(values) for _, values in bars]
    scale = (_WIDTH - _LEFT - 80) / max([*lengths, mark or 0.0, 1e-9])
    parts, y = [], 0
    for name, values in bars:
        parts.append(f'<text x="0" y="{y + 14}">{escape(name)}</text>')
        parts += _bars(values, y, scale, stacked=stacked, digits=digits)
        y += (_BAR if stacked else _BAR * len(values)) + _GAP
    if mark is not None:
        x = _LEFT + mark * scale
        parts.append(f'<path d="M{x:.1f} 0V{y}" stroke="#b42318" stroke-dasharray="4"/>')
    return f'<svg width="{_WIDTH}" height="{y}" role="img">{"".join(parts)}</svg>'


def _bars(
    values: Sequence[float], y: int, scale: float, *, stacked: bool, digits: int
) -> Iterator[str]:
    x = float(_LEFT)
    for number, value in enumerate(values):
        width, top = value * scale, y if stacked else y + number * _BAR
        yield (
            f'<rect x="{x:.1f}" y="{top}" width="{width:.1f}" height="{_BAR - 2}" '
            f'fill="{_COLOURS[number]}"/>'
        )
        if not stacked:
            yield f'<text x="{x + width + 6:.1f}" y="{top + 13}">{value:,.{digits}f}</text>'
        x += width if stacked else 0.0
