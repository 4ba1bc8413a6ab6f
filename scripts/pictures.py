"""The pictures of the documentation, drawn from the code's own tables and from recorded results.

`python -m scripts.render_docs` writes them to docs/pictures/; a test compares.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from s3kv.host.table import TRANSITIONS, EntryState
from s3kv.planning.requests import REQUEST_TRANSITIONS, RequestState
from scripts import svg
from scripts.svg import Box

ROOT = Path(__file__).resolve().parent.parent
Edges = dict[tuple[str, str], list[str]]


def slot_edges() -> Edges:
    """{(state, next state): events} of a slot of host memory."""
    edges: Edges = {}
    for event, moves in TRANSITIONS.items():
        for begin, end in moves.items():
            edges.setdefault((begin.name, end.name), []).append(event)
    return edges


def request_edges() -> Edges:
    """{(state, next state): events} of a request."""
    edges: Edges = {}
    for (begin, event), end in REQUEST_TRANSITIONS.items():
        edges.setdefault((begin.name, end.name), []).append(event.value)
    return edges


def slots() -> str:
    """The life of a slot, from `s3kv.host.table.TRANSITIONS`."""
    places = {"FREE": (90, 170), "RESERVED": (310, 170), "DIRTY": (550, 85), "CLEAN": (550, 255)}
    assert set(places) == {state.name for state in EntryState}
    bends = {
        ("FREE", "RESERVED"): 22.0,
        ("RESERVED", "FREE"): 22.0,
        ("DIRTY", "FREE"): -80.0,
        ("CLEAN", "FREE"): 80.0,
    }
    return state_diagram(660, 340, "The states of a slot", places, slot_edges(), bends)


def requests() -> str:
    """The life of a request, from `s3kv.planning.requests.REQUEST_TRANSITIONS`."""
    places = {
        "NEW": (90, 170),
        "WAITING": (290, 60),
        "OFFERED": (490, 170),
        "LOADING": (690, 170),
        "COMPUTING": (590, 330),
    }
    assert set(places) == {state.name for state in RequestState}
    bends = {
        ("NEW", "WAITING"): 24.0,
        ("WAITING", "NEW"): 24.0,
        ("NEW", "OFFERED"): 18.0,
        ("OFFERED", "NEW"): 18.0,
        ("WAITING", "COMPUTING"): 165.0,
        ("NEW", "COMPUTING"): -22.0,
        ("COMPUTING", "NEW"): 60.0,
    }
    return state_diagram(780, 420, "The states of a request", places, request_edges(), bends)


def state_diagram(
    width: float,
    height: float,
    title: str,
    places: Mapping[str, tuple[float, float]],
    edges: Edges,
    bends: Mapping[tuple[str, str], float],
) -> str:
    """States as boxes, events as arrows; what leaves a state as it is stands in its box."""
    boxes = {name: Box(x, y, 122, 46) for name, (x, y) in places.items()}
    arrows = [
        svg.arrow(boxes[begin], boxes[end], ", ".join(events), bend=bends.get((begin, end), 0.0))
        for (begin, end), events in edges.items()
        if begin != end
    ]
    stays = {
        begin: "↻ " + ", ".join(events) for (begin, end), events in edges.items() if begin == end
    }
    drawn = [svg.box(at, *filter(None, (name, stays.get(name)))) for name, at in boxes.items()]
    return svg.document(width, height, title, *arrows, *drawn)


def tiers() -> str:
    """The three tiers, and what moves bytes between them."""
    gpu, host, bucket = Box(110, 110, 150, 76), Box(370, 110, 170, 76), Box(640, 110, 170, 76)
    other = Box(640, 250, 210, 56)
    return svg.document(
        760,
        310,
        "GPU, host memory and bucket, and what moves between them",
        svg.arrow(gpu, host, "save", bend=26),
        svg.arrow(host, gpu, "load", bend=26),
        svg.arrow(host, bucket, "upload", bend=26),
        svg.arrow(bucket, host, "fetch", bend=26),
        svg.arrow(other, bucket, "the same objects", both=True),
        svg.box(gpu, "GPU", "vLLM's own blocks", "a request's prefix", color=svg.GREEN),
        svg.box(host, "host memory", "pinned, per worker", "evicted by LRU"),
        svg.box(bucket, "bucket", "one object per chunk", "shared by the fleet", color=svg.AMBER),
        svg.box(other, "every other replica", "and the next start of this one", color=svg.GREY),
        svg.words(240, 20, "copies beside the engine", color=svg.SOFT, size=12),
        svg.words(510, 20, "a process of its own", color=svg.SOFT, size=12),
        svg.words(
            30, 232, "Only what has arrived and was verified is", color=svg.SOFT, anchor="start"
        ),
        svg.words(
            30, 252, "offered to the engine. All else is a miss:", color=svg.SOFT, anchor="start"
        ),
        svg.words(30, 272, "it is computed, as without a cache.", color=svg.SOFT, anchor="start"),
    )


def engine_bars() -> str:
    """Time per request of `benchmarks/results/engine-rgw.json`."""
    result = recorded("engine-rgw.json")
    rows = (
        ("none", "computed, no connector", svg.GREY),
        ("cold", "computed, saving to S3", svg.GREY),
        ("warm", "from S3, in a new process", svg.BLUE),
        ("local", "from the engine's own cache", svg.GREEN),
    )
    longest = max(result["median_ms"][key] for key, _, _ in rows)
    elements = []
    for i, (key, label, color) in enumerate(rows):
        y, milliseconds = 46 + i * 36, result["median_ms"][key]
        wide = 400 * milliseconds / longest
        elements += [
            svg.words(210, y + 12, label, anchor="end"),
            svg.bar(222, y, wide, 24, color),
            svg.words(232 + wide, y + 12, f"{milliseconds:,.0f} ms", anchor="start", size=12),
        ]
    about = f"median per request, {result['prompts']}, {result['machine']}, Ceph on the same cores"
    return svg.document(
        720,
        200,
        "Time per request: " + about,
        svg.words(360, 20, about, color=svg.SOFT, size=12),
        *elements,
    )


def recorded(name: str) -> dict[str, Any]:
    """A file of benchmarks/results/."""
    result: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / name).read_text())
    return result


ALL = {"slots": slots, "requests": requests, "tiers": tiers, "engine": engine_bars}
"""By the name of the file in docs/pictures/, without its ending."""
