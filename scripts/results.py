"""The tables of docs/performance.md and docs/peers-benchmark.md, from benchmarks/results/."""

from __future__ import annotations

import math
from typing import Any

from benchmarks.simulation.fleet import OURS
from scripts.marks import filled
from scripts.pictures import ROOT, recorded

FAILED: dict[str, Any] = {"failed": []}
"""A pass that never was."""
STAND_INS = (
    "On this machine `lab/offloading_on_cpu.py` stands in for the streams, events and copy kernel "
    "of a GPU under `offloading-…`, and `benchmarks/peers/lmcache_on_cpu.py` under `lmcache`."
)


def page() -> str:
    """docs/performance.md."""
    return filled(
        ROOT / "docs" / "performance.md",
        {
            "engine-shaped": engine(recorded("engine-shaped.json")),
            "planner": planner(recorded("planner.json")),
            "trace": trace(recorded("trace-session.json")),
        },
    )


def peers_page() -> str:
    """docs/peers-benchmark.md."""
    document = ROOT / "docs" / "peers-benchmark.md"
    return filled(document, {"peers-shaped": peers(recorded("peers-shaped.json"))})


def engine(result: dict[str, Any]) -> str:
    median = result["median_ms"]
    rows = [
        ("computed, no connector", median["none"]),
        ("computed, saving to S3", median["cold"]),
        ("served from S3 by a new process", median["warm"]),
        ("served from the engine's own cache", median["local"]),
        ("the same objects read by plain sockets, without an engine", median["raw"]),
    ]
    return "\n".join(
        [
            f"{result['machine']}; {result['prompts']}, one after another.",
            "",
            "| | median per request | relative to computing |",
            "|---|---|---|",
            *(f"| {name} | {ms:,.0f} ms | {_ratio(ms / median['none'])} |" for name, ms in rows),
            "",
            *(
                [_over_floor("A hit", median["warm"], median["local"], result["raw"])]
                if "raw" in result
                else []
            ),
        ]
    )


def _over_floor(hit: str, warm_ms: float, local_ms: float, raw: dict[str, Any]) -> str:
    """The time of a hit, relative to what nothing can do without."""
    over = _ratio(warm_ms / (local_ms + raw["median_ms"]))
    return (
        f"{hit} takes {over} times as long as a hit in the engine's own cache plus reading "
        f"the same objects by plain sockets ({raw['connections']} at once, the fastest)."
    )


CONNECTORS = {
    "none": "no connector",
    "again": "no connector, once more",
    "empty": "a connector whose hooks do nothing",
    "own": "s3kv",
}
"""The passes of `benchmarks/turns.py`."""


def passes(result: dict[str, Any]) -> str:
    """A table of the passes of one engine with each connector."""
    figure = "requests_per_s" if "requests_per_s" in result else "median_ms"
    lines = [
        f"{result['machine']}; {result['prompts']}; {result['turns']} turns on each of "
        f"{result['engines']} engines.",
        "",
        f"| | {figure.replace('_', ' ')} | relative to none | 95 % confidence interval |",
        "|---|---|---|---|",
    ]
    for name, told in CONNECTORS.items():
        ratio = result["ratio"].get(name, {"median": 1.0, "interval_95": None})
        interval = ratio["interval_95"]
        cells = [
            f"{result[figure][name]:,.2f}",
            f"{ratio['median']:.3f}",
            "{:.3f} to {:.3f}".format(*interval) if interval else "–",
        ]
        lines.append(f"| {told} | {' | '.join(cells)} |")
    return "\n".join(lines)


def readme() -> str:
    """README.md."""
    speed = [engine(recorded("engine-shaped.json")), beside(recorded("peers-shaped.json"))]
    return filled(ROOT / "README.md", {"speed": "\n\n".join(speed)})


def beside(result: dict[str, Any]) -> str:
    """A hit of the tier beside one of vLLM's own tier for object stores, in one run."""
    ours_ms, theirs_ms = (
        result["passes"][f"offloading-{tier}"]["warm"]["median_ms"] for tier in ("s3kv", "obj")
    )
    return (
        f"As a tier of vLLM's `OffloadingConnector`, a hit takes {_ratio(ours_ms / theirs_ms)} "
        f"times as long as with vLLM's own tier `obj` (NIXL) in one run: {ours_ms:,.0f} ms instead "
        f"of {theirs_ms:,.0f} ms ([measured beside others](docs/peers-benchmark.md))."
    )


def planner(result: dict[str, Any]) -> str:
    names = {
        "lookup_waiting_us": "a repeated lookup while a fetch is in progress",
        "plan_idle_us": "planning a step with nothing to do",
        "plan_256_decoding_us": "planning a step with 256 requests in decode",
        "first_lookup_nothing_known_us": "first lookup, nothing known",
        "arrival_nothing_known_us": "arrival of that request, which orders 64 fetches",
        "first_lookup_all_resident_us": "first lookup, all chunks in host memory",
        "first_lookup_all_in_bucket_us": "first lookup, all chunks known to be in the bucket",
        "arrival_all_in_bucket_us": "arrival of that request, which orders 256 fetches",
        "tier_scan_first_us": "the tier: all lookups of a first pass, nothing known",
        "obj_scan_first_us": "the same with vLLM's tier `obj`",
        "tier_scan_waiting_us": "the tier: all lookups of a pass in which the request waits",
        "obj_scan_waiting_us": "the same with vLLM's tier `obj`",
    }
    measured = result["measured"]
    chunks = f"{result['chunks_per_prompt']:,}"
    return "\n".join(
        [
            f"Prompts of {chunks} chunks; {result['chunks_known']:,} chunks known.",
            "",
            "| | µs |",
            "|---|---|",
            *(f"| {said} | {measured[n]:,.1f} |" for n, said in names.items() if n in measured),
        ]
    )


def trace(result: dict[str, Any]) -> str:
    lines = [
        f"{result['trace']['requests']:,} requests on {result['setup']['engines']} engines, "
        f"{result['setup']['kib_per_token']:g} KiB of KV per token, "
        f"{result['setup']['prefill_tokens_per_s']:,.0f} tokens per second in prefill. Per cent of "
        "prompt tokens by source.",
        "",
        "| host memory per engine | device | host | bucket | computed | median TTFT |",
        "|---|---|---|---|---|---|",
    ]
    for run in result["runs"]:
        if run["policy"] == OURS and not run["bucket_gib"]:
            continue
        share = run["percent"]
        memory = f"{run['host_gib']:g} GiB" if run["host_gib"] else f"– ({run['policy']})"
        places = " | ".join(f"{share[k]:.1f}" for k in ("gpu", "host", "bucket", "computed"))
        lines.append(f"| {memory} | {places} | {run['ttft_ms']['p50'] / 1e3:.1f} s |")
    return "\n".join(lines)


def peers(result: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    passes = result["passes"]
    none = passes["none"]
    lines = [
        f"{result['machine']}; {versions}; {result['prompts']}; rounds: {result['rounds']}.",
        "",
        "| | cold, saving | CPU time | all saved | warm | relative to local | slowest | CPU time |",
        "|---|---|---|---|---|---|---|---|",
        f"| no connector | {_pass(none['computed'])} | – | {_warm(none['local'], none)} |",
    ]
    for name, states in passes.items():
        if name != "none":
            saved = result["saved"].get(name, {"after_last_answer_s": []})["after_last_answer_s"]
            late = f"{max(saved):.1f} s" if saved else "–"
            warm = _warm(states.get("warm", FAILED), none)
            lines.append(f"| `{name}` | {_pass(states['cold'])} | {late} | {warm} |")
    raw, ours = result.get("raw"), passes["s3kv"].get("warm", FAILED)
    if raw is None:  # older than the floor over all rounds
        lines += ["", f"Plain sockets, without an engine: {result['raw_read_median_ms']:,.0f} ms."]
    elif "failed" not in ours:
        local_ms = none["local"]["median_ms"]
        lines += ["", f"Plain sockets, without an engine: {raw['median_ms']:,.0f} ms."]
        lines[-1] += " " + _over_floor("A hit of s3kv", ours["median_ms"], local_ms, raw)
    io_ms = {
        state: told["cpu_ms_by_process"]["s3kv.io"]
        for state, told in passes["s3kv"].items()
        if "s3kv.io" in told.get("cpu_ms_by_process", {})
    }
    if io_ms:
        of_io = ", ".join(f"{state} {ms:,.0f} ms" for state, ms in io_ms.items())
        lines += ["", f"CPU time of s3kv's I/O process, contained in the above: {of_io}."]
    lines += ["", STAND_INS]
    out = [f"`{name}`: {reason}" for name, reason in result["left_out"].items()]
    out += [
        f"`{name}`, {state}: {'; '.join(dict.fromkeys(told['failed']))}"
        for name, states in passes.items()
        for state, told in states.items()
        if "failed" in told
    ]
    return "\n".join([*lines, *(["", "Not timed: " + ". ".join(out) + "."] if out else [])])


def _over_local(told: dict[str, Any], none: dict[str, Any]) -> str:
    """A warm pass, relative to the engine's own cache."""
    if "failed" in told:
        return "not timed"
    return _ratio(told["median_ms"] / none["local"]["median_ms"])


def _pass(told: dict[str, Any]) -> str:
    """The cells of a cold pass: median, processor time."""
    if "failed" in told:
        return "not timed | –"
    return f"{told['median_ms']:,.0f} ms | {told['cpu_ms_per_prompt']:,.0f} ms"


def _warm(told: dict[str, Any], none: dict[str, Any]) -> str:
    """The cells of a warm pass: median, over the engine's own cache, slowest, processor time."""
    if "failed" in told:
        return "not timed | – | – | –"
    ratio = _over_local(told, none)
    median, slowest, cpu = (
        f"{told[name]:,.0f} ms" for name in ("median_ms", "slowest_ms", "cpu_ms_per_prompt")
    )
    return f"{median} | {ratio} | {slowest} | {cpu}"


def _ratio(value: float) -> str:
    """Two decimals, halves up: as one rounds by hand."""
    return f"{math.floor(value * 100 + 0.5 + 1e-9) / 100:.2f}"
