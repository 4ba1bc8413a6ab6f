"""The pictures of the documentation, drawn from the code's own tables.

`python -m scripts.render_docs` writes them to docs/pictures/; a test compares. All are as narrow as
a phone, so that their letters stay readable there.
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
    places = {"FREE": (180, 34), "RESERVED": (180, 168), "DIRTY": (84, 330), "CLEAN": (276, 330)}
    assert set(places) == {state.name for state in EntryState}
    bends = {
        ("FREE", "RESERVED"): -34.0,
        ("RESERVED", "FREE"): -34.0,
        ("RESERVED", "DIRTY"): 0.0,
        ("DIRTY", "CLEAN"): -36.0,
        ("CLEAN", "DIRTY"): -36.0,
        ("CLEAN", "FREE"): -62.0,
    }
    return state_diagram(360, 400, "The states of a slot", places, slot_edges(), bends)


def requests() -> str:
    """The life of a request, from `s3kv.planning.requests.REQUEST_TRANSITIONS`."""
    places = {
        "NEW": (76, 170),
        "WAITING": (236, 34),
        "OFFERED": (284, 170),
        "LOADING": (290, 330),
        "COMPUTING": (126, 470),
    }
    assert set(places) == {state.name for state in RequestState}
    bends = {
        ("NEW", "WAITING"): 24.0,
        ("WAITING", "NEW"): 14.0,
        ("NEW", "OFFERED"): 0.0,
        ("OFFERED", "NEW"): 40.0,
        ("NEW", "COMPUTING"): 0.0,
        ("COMPUTING", "NEW"): 44.0,
        ("WAITING", "COMPUTING"): 0.0,
        ("OFFERED", "COMPUTING"): -14.0,
    }
    return state_diagram(360, 510, "The states of a request", places, request_edges(), bends)


def state_diagram(
    width: float,
    height: float,
    title: str,
    places: Mapping[str, tuple[float, float]],
    edges: Edges,
    bends: Mapping[tuple[str, str], float],
) -> str:
    """States as boxes, events as arrows; what leaves a state as it is stands in its box."""
    boxes = {name: Box(x, y, 132, 48) for name, (x, y) in places.items()}
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
    gpu, host, bucket, other = (Box(180, 50 + 130 * i, 230, 62) for i in range(4))
    return svg.document(
        360,
        530,
        "GPU, host memory and bucket, and what moves between them",
        svg.arrow(gpu, host, "save", bend=-50),
        svg.arrow(host, gpu, "load", bend=-50),
        svg.arrow(host, bucket, "upload", bend=-50),
        svg.arrow(bucket, host, "fetch", bend=-50),
        svg.arrow(other, bucket, "the same objects", both=True),
        svg.box(gpu, "GPU", "vLLM's own blocks", color=svg.GREEN),
        svg.box(host, "host memory", "pinned, per worker, evicted by LRU"),
        svg.box(bucket, "bucket", "one object per chunk", color=svg.AMBER),
        svg.box(other, "every other replica", "and the next start of this one", color=svg.GREY),
        svg.words(180, 500, "Only what has arrived and was verified is offered", color=svg.SOFT),
        svg.words(180, 518, "to the engine. All else is computed, as ever.", color=svg.SOFT),
    )


def recorded(name: str) -> dict[str, Any]:
    """A file of benchmarks/results/."""
    result: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / name).read_text())
    return result


ALL = {"requests": requests, "slots": slots, "tiers": tiers}
"""By the name of the file in docs/pictures/, without its ending."""
