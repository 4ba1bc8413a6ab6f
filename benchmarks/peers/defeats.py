"""The figures in which another connector is better than s3kv, with the reason. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

OURS = ("s3kv", "s3kv-compressed", "s3kv-disk", "offloading-s3kv")
FIGURES = {"median_ms": "time", "cpu_ms_per_prompt": "CPU time"}
SAVED = "until all is saved"
NOT_EXPLAINED = "not explained"
CLOSE, CLOSE_REASON = 1.02, "within 2 %: rounds of one connector differ by more"

_FILES = "copies files within this machine: no server, no signature, no digest"
_UNVERIFIED = "verifies nothing: s3kv's digests take 0.2 to 0.8 ms for 8 MiB"
_BESIDE = "compressing, the disk's files and s3kv's I/O process (see below) take processor time"
REASONS: dict[tuple[str, str, str], str] = {
    ("offloading-fs", "cold", "time"): _FILES,
    ("offloading-fs", "cold", "CPU time"): _FILES,
    ("offloading-fs", "cold", SAVED): _FILES,
    ("offloading-fs", "warm", "time"): _FILES,
    ("offloading-fs", "warm", "CPU time"): _FILES,
    ("offloading-obj", "cold", "CPU time"): _BESIDE,
    ("offloading-obj", "warm", "time"): _UNVERIFIED,
    ("offloading-obj", "warm", "CPU time"): _UNVERIFIED,
    ("lmcache", "cold", "CPU time"): _BESIDE,
}
"""By connector, state and figure."""


def of(models: Mapping[str, Any]) -> list[dict[str, str]]:
    """A row for each, of all cases of all models: where, figure, connector, ours, reason. A pass
    that failed is in no row."""
    return [row for model, told in models.items() for row in _rows(model, told)]


def _rows(model: str, told: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    for case, names in told["cases"].items():
        for state in ("cold", "warm"):
            passes = {name: states.get(state, {}) for name, states in names.items()}
            for key, figure in FIGURES.items():
                values = {name: one[key] for name, one in passes.items() if key in one}
                yield from _compared(f"{model}, {case}", state, figure, "ms", values)
    seconds = {name: sum(s["seconds"]) / len(s["seconds"]) for name, s in told["saved"].items()}
    yield from _compared(model, "cold", SAVED, "s", seconds)


def _compared(
    where: str, state: str, figure: str, unit: str, values: Mapping[str, float]
) -> Iterator[dict[str, str]]:
    """unit: "ms", without decimals, or "s", with one."""
    digits = {"ms": 0, "s": 1}[unit]
    texts = {name: f"`{name}` {value:,.{digits}f} {unit}" for name, value in values.items()}
    for name in sorted(values.keys() - {*OURS, "none"}):
        if slower := [one for one in OURS if values.get(one, 0.0) > values[name]]:
            reason = REASONS.get((name, state, figure), NOT_EXPLAINED)
            if max(values[one] for one in slower) <= CLOSE * values[name]:
                reason = CLOSE_REASON
            yield {
                "where": f"{where}, {state}",
                "figure": figure,
                "connector": texts[name],
                "ours": ", ".join(texts[one] for one in slower),
                "reason": reason,
            }
