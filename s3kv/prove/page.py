"""HTML page of a report: one file with its style, and nothing from elsewhere. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

from s3kv.config import size
from s3kv.prove.report import margins_text

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:62rem;
padding:0 1rem;color:#1b1f24}
h1{font-size:1.4rem;padding:.7rem 1rem;border-radius:.4rem;color:#fff}
h1.yes{background:#1a7f37}h1.no{background:#b42318}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
td,th{padding:.25rem .7rem;text-align:right;border-bottom:1px solid #d8dee4}
td:first-child,th:first-child{text-align:left}.wrong{color:#b42318;font-weight:600}
"""

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
    findings = "".join(
        f'<li class="{"wrong" if one["wrong"] else ""}">{escape(one["arm"])}: '
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
            _table(COLUMNS, (cells(name, row) for name, row in report["arms"].items())),
            "</html>\n",
        )
    )


def _table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"
