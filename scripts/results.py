"""The tables of docs/performance.md and docs/peers-benchmark.md, from benchmarks/results/."""

from __future__ import annotations

import math
import statistics
from typing import Any

from benchmarks.peers import defeats
from benchmarks.simulation.fleet import OURS
from scripts.marks import ROOT, filled, recorded, table

FAILED: dict[str, Any] = {"failed": []}
"""A pass that never was."""
STAND_INS = (
    "On this machine `lab/offloading_on_cpu.py` stands in for the streams, events and copy kernel "
    "of a GPU under `offloading-…`. Nothing stands in under `s3kv` and `lmcache`."
)
ON_S3 = ("s3kv", "s3kv-compressed", "offloading-s3kv", "offloading-obj", "lmcache")
SERVERS = {"peers-shaped": "the shape of S3", "peers-weed": "SeaweedFS, without delay"}


def page() -> str:
    """docs/performance.md."""
    return filled(
        ROOT / "docs" / "performance.md",
        {
            "engine-shaped": engine(recorded("engine-shaped.json")),
            "gpu": gpu(recorded("gpu-h200.json")),
            "planner": planner(recorded("planner.json")),
            "compressed": compressed(recorded("compressed.json")),
            "compression": compression(recorded("compression.json")),
            "trace": trace(recorded("trace-session.json")),
            "disk": disk(recorded("trace-disk.json")),
            "disk-files": disk_files(recorded("peers-disk.json")),
        },
    )


def peers_page() -> str:
    """docs/peers-benchmark.md."""
    made = {path.stem for path in (ROOT / "benchmarks" / "results").glob("peers-*.json")}
    found = {n: recorded(f"{n}.json") if n in made else None for n in SERVERS}
    parts = {
        name: _compared(result) if result else "Not measured yet." for name, result in found.items()
    }
    lost = [line for name, result in found.items() if result for line in _lost(result, name)]
    return filled(ROOT / "docs" / "peers-benchmark.md", parts | {"peers-defeats": "\n".join(lost)})


def engine(result: dict[str, Any]) -> str:
    median = result["median_ms"]
    rows = [
        ("computed, no connector", median["none"]),
        ("computed, saving to S3", median["cold"]),
        ("computed, saving to S3 and a disk", median["saving"]),
        ("served from S3 by a new process", median["warm"]),
        ("served from the disk by a new process", median["disk"]),
        ("the same, with none of its files in the page cache", median["uncached"]),
        ("served from the engine's own cache", median["local"]),
        ("the same objects read by plain sockets, without an engine", median["raw"]),
    ]
    times = [(name, f"{ms:,.0f} ms", _ratio(ms / median["none"])) for name, ms in rows]
    return "\n\n".join(
        (
            f"{result['machine']}; {result['prompts']}, one after another.",
            table(("", "median per request", "relative to computing"), times),
            _over_floor("A hit", median["warm"], median["local"], result["raw"]),
        )
    )


def gpu(result: dict[str, Any]) -> str:
    """What was measured on a machine with a GPU, each at its commit."""
    machine = result["machine"]
    tests, engines, chunks = result["tests"], result["engines"], result["large_chunks"]
    pieces = " and ".join(f"{n:,}" for n in chunks["pieces"])
    equal = sum(engine["equal"] for engine in engines)
    named = ", ".join(f"{n} {machine['packages'][n]}" for n in ("vllm", "torch", "triton"))
    models = ", ".join(sorted({f"`{engine['model']}`" for engine in engines}))
    compiled = sum("compile" in engine for engine in engines)
    pictures = result["encoder_outputs"]
    loaded = pictures["arms"]["bucket"]["metrics"]["vllm:s3kv_ec_hits_total"]
    told = [
        f"{machine['gpu']}, driver {machine['driver']}, {machine['processor']}, {machine['link']}; "
        f"{named}.",
        f"{tests['passed']} tests passed, {tests.get('failed', 0)} failed. {equal} of "
        f"{len(engines)} engines gave the same tokens from host memory and from the bucket as from "
        "their own cache, with hits of the same length and nothing left under way: models "
        f"{models} of `lab/`, {compiled} of them with `torch.compile`. A new engine loaded "
        f"{loaded:.0f} of {pictures['pictures']} encoder outputs, and its tokens were "
        f"{'the same' if pictures['equal'] else 'other ones'}. In "
        f"{chunks['times']} rounds with chunks of {pieces} pieces {chunks['wrong_bytes']} bytes "
        f"were wrong. Tests that passed under compute-sanitizer: {result['memcheck']['passed']}.",
    ]
    rows = []
    for times in result["times"]:
        none = times["front"] == "none"
        tiers = ("cold" if none else "alone", "" if none else "cold", "engine", "host", "bucket")
        found = [times["ttft_ms"].get(tier) for tier in tiers]
        cells = [f"{statistics.median(ms):,.0f} ms" if ms else "–" for ms in found]
        rows.append([times["front"], "–" if none else times["network_threads"], *cells])
    rows.sort(key=lambda row: ("none", "tier", "connector").index(row[0]))
    places = ("own cache", "host memory", "bucket")
    told.append(table(("", "threads", "cold, alone", "cold, beside uploads", *places), rows))
    rows = [
        [
            f"{threads} thread{'s' * (threads != '1')}",
            *(f"{part['gb_per_s'][name]:.3g}" for name in ("fetch", "network", "bus")),
        ]
        for threads, part in result["network_threads"]["parts"].items()
    ]
    told.append(table(("", "fetched, GB/s", "sockets, GB/s", "bus, GB/s"), rows))
    return "\n\n".join([*told, _copies(result["copies"]["parts"])])


def _copies(parts: dict[str, Any]) -> str:
    rows = []
    for name, part in parts.items():
        if not name.startswith("throughput"):
            continue
        model = name.removeprefix("throughput, ").removesuffix(", 16 tokens")
        # Of the time when there was another way, a result has figures of both.
        rates = part.get("gather", part)["gb_per_s"]
        saved, loaded, large = (f"{rates[name]:.3g}" for name in ("saved", "loaded", "large_in"))
        pieces = f"{part['longest_run_bytes'] / 1024:g} KiB"
        rows.append((model, pieces, saved, loaded, f"{large} GB/s"))
    return table(("blocks of 16 tokens", "pieces", "saved", "loaded", "one large copy"), rows)


def _over_floor(hit: str, warm_ms: float, local_ms: float, raw: dict[str, Any]) -> str:
    """The time of a hit, relative to what nothing can do without."""
    over = _ratio(warm_ms / (local_ms + raw["median_ms"]))
    return (
        f"{hit} takes {over} times as long as a hit in the engine's own cache plus reading "
        f"the same objects by plain sockets ({raw['connections']} at once, the fastest)."
    )


def readme() -> str:
    """README.md."""
    speed = [engine(recorded("engine-shaped.json")), beside(recorded("peers-shaped.json"))]
    return filled(ROOT / "README.md", {"speed": "\n\n".join(speed)})


def beside(result: dict[str, Any]) -> str:
    """A hit of the tier beside one of vLLM's own tier for object stores, of a real model, in one
    run."""
    ours_ms, theirs_ms = (
        result["models"]["smollm"]["cases"]["one user"][f"offloading-{tier}"]["warm"]["median_ms"]
        for tier in ("s3kv", "obj")
    )
    return (
        "As a tier of vLLM's `OffloadingConnector`, a hit of SmolLM2-135M takes "
        f"{_ratio(ours_ms / theirs_ms)} times as long as with vLLM's own tier `obj` (NIXL) in one "
        f"run: {ours_ms:,.0f} ms instead of {theirs_ms:,.0f} ms "
        "([measured beside others](docs/peers-benchmark.md))."
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
    return "\n\n".join(
        (
            f"Prompts of {chunks} chunks; {result['chunks_known']:,} chunks known.",
            table(("", "µs"), [(said, f"{measured[name]:,.1f}") for name, said in names.items()]),
            "In virtual time, prompts of 12 chunks of 43 ms each of which the bucket has nothing "
            f"wait {measured['cold_wait_mean_ms']:.1f} ms for its answers, the first "
            f"{measured['cold_wait_first_ms']:.1f} ms (first bytes of 30 ms, with a tail; nothing "
            "else to compute).",
        )
    )


def compressed(result: dict[str, Any]) -> str:
    """Hits and cold prompts of an engine with compressed objects, by the rate of the link."""
    about = f"{result['machine']}; {result['prompts']}. Median TTFT; cold: relative to `off`."
    head = ["link", *(f"hit, `{mode}`" for mode in ("off", "on", "auto")), "`on` to `off`"]
    head += ["`auto` to the better", "cold, `on`", "cold, `auto`", "encrypted: hit, cold"]
    rows = []
    for link, told in result["links_mb_s"].items():
        ms = told["median_ms"]
        rates = f"{link} MB/s" if link != "0" else "no limit"
        hits = (f"{ms[f'warm-{mode}']:.0f} ms" for mode in ("off", "on", "auto"))
        names = ("warm_on_over_off", "warm_auto_over_best", "cold_on_over_off")
        ratios = (f"{told[name]:.2f}" for name in (*names, "cold_auto_over_off"))
        encrypted = (f"{told[f'{name}_encrypted_over_off']:.2f}" for name in ("warm", "cold"))
        rows.append((rates, *hits, *ratios, ", ".join(encrypted)))
    return f"{about}\n\n{table(head, rows)}"


def compression(result: dict[str, Any]) -> str:
    """Compressed objects by kind of content."""
    told = [
        f"{result['machine']}; Blosc2 {result['blosc2']}; chunks: {result['chunks']}. GB/s of "
        f"plain bytes on one core; a copy of a chunk runs at {result['memcpy_gb_per_s']:.0f} GB/s "
        "there, in the processor's cache."
    ]
    head = ("", "compressed, of plain", "entropy", "encoded, GB/s", "decoded, GB/s")
    told.append(table(head, [(name, *_coded(row)) for name, row in result["kinds"].items()]))
    if missing := ", ".join(result["left_out"]):
        told.append(f"Not measured: {missing}.")
    return "\n\n".join(told)


def _coded(row: dict[str, float | None]) -> list[str]:
    """The cells of a codec: shares, and speeds."""
    return [
        "–" if value is None else f"{value:.2f}" if "gb_per_s" in name else f"{value:.3f}"
        for name, value in row.items()
    ]


def trace(result: dict[str, Any]) -> str:
    about = (
        f"{result['trace']['requests']:,} requests on {result['setup']['engines']} engines, "
        f"{result['setup']['kib_per_token']:g} KiB of KV per token, "
        f"{result['setup']['prefill_tokens_per_s']:,.0f} tokens per second in prefill. Per cent of "
        "prompt tokens by source."
    )
    rows = []
    for run in result["runs"]:
        if run["policy"] == OURS and not run["bucket_gib"]:
            continue
        share = run["percent"]
        memory = f"{run['host_gib']:g} GiB" if run["host_gib"] else f"– ({run['policy']})"
        places = [f"{share[k]:.1f}" for k in ("gpu", "host", "bucket", "computed")]
        rows.append((memory, *places, f"{run['ttft_ms']['p50'] / 1e3:.1f} s"))
    head = ("host memory per engine", "device", "host", "bucket", "computed", "median TTFT")
    return f"{about}\n\n{table(head, rows)}"


def disk(result: dict[str, Any]) -> str:
    """A disk in front of the bucket, against none."""
    runs = [run for run in result["runs"] if run["policy"] == OURS]
    none = next(run for run in runs if not run["disk_gib"])
    about = (
        f"{none['host_gib']:g} GiB of host memory per engine, "
        f"{none['bucket_gib']:,.0f} GiB in the bucket. Per cent of prompt tokens by source; GETs "
        "and dollars relative to no disk."
    )
    head = ["engines per disk", "disk", "written", "host", "disk", "bucket", "median TTFT"]
    head += ["GETs spared in the hour", "net, $ a month", "written a day and disk", "per byte read"]
    rows = []
    for run in runs:
        share, told = run["percent"], run["disk"]
        cells = [
            *(f"{run['engines_per_host']}", f"{run['disk_gib']:,.0f} GiB", run["disk_admission"]),
            *(f"{share[k]:.1f}" for k in ("host", "disk", "bucket")),
            f"{run['ttft_ms']['p50'] / 1e3:.2f} s",
            f"{none['requests']['get_hit'] - run['requests']['get_hit']:,}",
            f"{run['usd_per_month']['net'] - none['usd_per_month']['net']:+,.0f}",
            f"{told['tb_per_day']:,.1f} TB",
            f"{told['written_per_read']:.1f}",
        ]
        if not run["disk_gib"]:
            cells[:3], cells[7:] = ("–", "none", "–"), "–" * 4
        rows.append(cells)
    return f"{about}\n\n{table(head, rows)}"


def disk_files(result: dict[str, Any]) -> str:
    """A hit from the disk beside one from vLLM's own files."""
    user = result["models"]["random"]["cases"]["one user"]
    ours, theirs = (user[name]["warm"] for name in ("s3kv-disk", "offloading-fs"))
    local_ms = user["none"]["local"]["median_ms"]
    told = [
        f"{p['median_ms']:.0f} ms, {p['median_ms'] / local_ms:.2f} times" for p in (ours, theirs)
    ]
    return (
        f"In one run, a prompt of 1,600 tokens in a new process took {told[0]} a hit in the "
        f"engine's own cache; with vLLM's own tier of files (`fs`) {told[1]}."
    )


def peers(result: dict[str, Any]) -> str:
    """A comparison with other connectors: first the figures in which they are better."""
    return "\n".join([*_lost(result), "", _compared(result)])


def _compared(result: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    lines = [f"{result['machine']}; {versions}; rounds: {result['rounds']}."]
    for model, told in result["models"].items():
        lines += ["", f"**Model `{model}`**: {told['prompts']}. One user:", "", _one_user(told)]
        lines += [*_other_cases(told["cases"]), *_remarks(told)]
    lines += ["", STAND_INS]
    out = [f"`{name}`: {reason}" for name, reason in result["left_out"].items()]
    out += [
        f"`{name}`, {model}, {case}, {state}: {'; '.join(dict.fromkeys(told['failed']))}"
        for model, of_model in result["models"].items()
        for case, names in of_model["cases"].items()
        for name, states in names.items()
        for state, told in states.items()
        if "failed" in told
    ]
    return "\n".join([*lines, *(["", "Not timed: " + ". ".join(out) + "."] if out else [])])


def _lost(result: dict[str, Any], server: str = "") -> list[str]:
    """A table of the figures in which another connector is better. server: a key of `SERVERS`."""
    on = f"On {SERVERS[server]}" if server else "Here"
    rows = [list(row.values()) for row in defeats.of(result["models"])]
    if not rows:
        return [f"{on}, no other connector is better in any figure.", ""]
    lost = table(("where", "figure", "better", "s3kv", "reason"), rows)
    return [f"{on}, another connector is better than s3kv in these figures:", "", lost, ""]


def _one_user(told: dict[str, Any]) -> str:
    """A table of cold and warm passes."""
    passes = told["cases"].get("one user", {})
    if not passes:
        return ""
    none = passes["none"]
    head = ("", "cold, saving", "CPU time", "all saved", "warm", "relative to local", "fastest")
    rows = [("no connector", *_pass(none["computed"]), "–", *_warm(none["local"], none))]
    for name, states in passes.items():
        if name != "none":
            seconds = told["saved"].get(name, {"seconds": []})["seconds"]
            late = f"{max(seconds):.1f} s" if seconds else "–"
            warm = _warm(states.get("warm", FAILED), none)
            rows.append((f"`{name}`", *_pass(states["cold"]), late, *warm))
    return table((*head, "slowest", "CPU time"), rows)


def _other_cases(cases: dict[str, Any]) -> list[str]:
    """A table of the other cases: medians, a warm one with the slowest request."""
    columns = [
        (case, state)
        for case, names in cases.items()
        for state in ("cold", "warm")
        if case != "one user" and (state == "warm" or "computed" in names["none"])
    ]
    if not columns:
        return []
    own = {"cold": "computed", "warm": "local"}
    names = list(dict.fromkeys(name for case, _ in columns for name in cases[case]))
    rows = []
    for name in names:
        states = own if name == "none" else {"cold": "cold", "warm": "warm"}
        cells = [
            _cell(cases[case].get(name, {}).get(states[state], FAILED)) for case, state in columns
        ]
        title = "no connector" if name == "none" else f"`{name}`"
        rows.append((title, *cells))
    others = table(("", *(f"{case}, {state}" for case, state in columns)), rows)
    return ["", "Other cases, the median and the slowest request:", "", others]


def _cell(told: dict[str, Any]) -> str:
    if "failed" in told:
        return "not timed"
    hit = told["hit_percent"]
    less = f", {hit:.0f} % hit" if 0.0 < hit < 99.5 else ""
    return f"{told['median_ms']:,.0f}, {told['slowest_ms']:,.0f} ms{less}"


def _remarks(told: dict[str, Any]) -> list[str]:
    """The time beyond a local hit, the floor, and the processor time of the I/O process."""
    passes = told["cases"].get("one user", {})
    ours, raw = passes.get("s3kv", {}), told["raw"]
    lines = []
    local_ms = passes["none"]["local"]["median_ms"] if passes else 0.0
    added = [
        f"`{name}` {states['warm']['median_ms'] - local_ms:,.0f} ms"
        for name, states in passes.items()
        if "median_ms" in states.get("warm", {}) and name in ON_S3
    ]
    if added:
        lines += ["", f"Beyond a hit in the engine's own cache, a hit takes: {', '.join(added)}."]
    if raw["median_ms"] and "failed" not in ours.get("warm", FAILED):
        over = _over_floor("A hit of s3kv", ours["warm"]["median_ms"], local_ms, raw)
        lines += ["", f"Plain sockets, without an engine: {raw['median_ms']:,.0f} ms. {over}"]
    io_ms = [
        f"{state} {one['cpu_ms_by_process']['s3kv.io']:,.0f} ms"
        for state, one in ours.items()
        if "s3kv.io" in one.get("cpu_ms_by_process", {})
    ]
    if io_ms:
        of_io = ", ".join(io_ms)
        lines += ["", f"CPU time of s3kv's I/O process, contained in the above: {of_io}."]
    return lines


def _pass(told: dict[str, Any]) -> tuple[str, ...]:
    """The cells of a cold pass: median, processor time."""
    if "failed" in told:
        return "not timed", "–"
    return f"{told['median_ms']:,.0f} ms", f"{told['cpu_ms_per_prompt']:,.0f} ms"


def _warm(told: dict[str, Any], none: dict[str, Any]) -> tuple[str, ...]:
    """The cells of a warm pass: median, over the engine's own cache, range, processor time."""
    if "failed" in told:
        return "not timed", "–", "–", "–", "–"
    ratio = _ratio(told["median_ms"] / none["local"]["median_ms"])
    median, *others = (
        f"{told[name]:,.0f} ms"
        for name in ("median_ms", "fastest_ms", "slowest_ms", "cpu_ms_per_prompt")
    )
    return median, ratio, *others


def _ratio(value: float) -> str:
    """Two decimals, halves up: as one rounds by hand."""
    return f"{math.floor(value * 100 + 0.5 + 1e-9) / 100:.2f}"
