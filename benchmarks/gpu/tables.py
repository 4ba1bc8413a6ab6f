"""The results of the GPU's benchmarks as tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.gpu.drag import KINDS


def copies(result: Mapping[str, Any]) -> str:
    """Of `benchmarks.gpu_copies`."""
    parts = result["parts"]
    tables = [
        _table(
            ("shape", "path", "saved", "of large", "loaded", "of large", "torch saves", "loads"),
            _throughput(parts),
        ),
        _table(("one chunk", "path", "save", "fence", "load", "poll"), _launch(parts)),
        _table(("work", "path", "step", *KINDS[1:]), _drag(parts)),
    ]
    return "\n".join([_head(result), *tables])


def path(result: Mapping[str, Any]) -> str:
    """Of `benchmarks.gpu_path`."""
    ways = ("network", "bus", "fetch", "path")
    rows = [
        [name, *(_gb(part["gb_per_s"][way]) for way in ways), f"{part['of_slower']:.2f}"]
        for name, part in result["parts"].items()
    ]
    return "\n".join([_head(result), _table(("shape", *ways, "of the slower"), rows)])


def _head(result: Mapping[str, Any]) -> str:
    left_out = f"; left out: {', '.join(result['left_out'])}" if result["left_out"] else ""
    return f"{result['device']}, {result['machine']}, torch {result['torch']}{left_out}.\n"


def _throughput(parts: Mapping[str, Any]) -> Iterator[list[str]]:
    for name, path_name, by in _paths(parts, "throughput, "):
        if "refused" in by:
            yield [name, path_name, by["refused"]]
            continue
        taken = [choice["path"] for choice in by["choices"]] if path_name == "chosen" else []
        rate = by["gb_per_s"]
        ours = [_gb(rate["saved"]), f"{by['saved_of_large']:.2f}"]
        ours += [_gb(rate["loaded"]), f"{by['loaded_of_large']:.2f}"]
        yield [
            name,
            " ".join([path_name, *taken]),
            *ours,
            _gb(rate["torch_saved"]),
            _gb(rate["torch_loaded"]),
        ]


def _launch(parts: Mapping[str, Any]) -> Iterator[list[str]]:
    for _, path_name, by in _paths(parts, "launch"):
        shape = f"{parts['launch']['layers']} layers, {parts['launch']['blocks']} blocks"
        calls = (by[call] for call in ("save", "fence", "load", "poll") if "refused" not in by)
        told = [f"{call['median']:.0f} µs ({call['p90']:.0f})" for call in calls]
        yield [shape, path_name, *(told or [by.get("refused", "")])]


def _drag(parts: Mapping[str, Any]) -> Iterator[list[str]]:
    for name, path_name, by in _paths(parts, "drag, "):
        if "refused" in by:
            yield [name, path_name, by["refused"]]
            continue
        slower = [
            f"{100 * by[kind]['slower']:+.1f} % at {_gb(by[kind]['gb_per_s'])}"
            for kind in KINDS[1:]
        ]
        yield [name, path_name, f"{by['none']['ms']['median']:.3f} ms", *slower]


def _paths(parts: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """(what was measured, path, figures) of the parts whose name begins with `prefix`."""
    for name, part in parts.items():
        if name.startswith(prefix):
            for path_name in ("batch", "gather", "chosen"):
                yield name.removeprefix(prefix), path_name, part[path_name]


def _gb(rate: float) -> str:
    return f"{rate:.1f} GB/s"


def _table(titles: Sequence[str], rows: Iterator[list[str]] | list[list[str]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in ([*titles], ["---"] * len(titles), *rows)]
    return "\n".join([*lines, ""])
