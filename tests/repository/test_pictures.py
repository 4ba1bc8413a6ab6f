"""The pictures of the documentation show what the code's tables hold."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

from s3kv.host.table import TRANSITIONS, EntryState
from s3kv.planning.requests import REQUEST_TRANSITIONS, RequestState
from tests.project import ROOT

PICTURES = ROOT / "docs" / "pictures"
SLOTS = [(a.name, b.name, event) for event, moves in TRANSITIONS.items() for a, b in moves.items()]
REQUESTS = [(a.name, b.name, event.value) for (a, event), b in REQUEST_TRANSITIONS.items()]


@pytest.mark.parametrize("path", sorted(PICTURES.glob("*")), ids=lambda path: path.stem)
def test_a_picture_is_well_formed_and_needs_nothing_from_elsewhere(path: Path) -> None:
    drawing = path.read_text()
    root = ET.fromstring(drawing)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    # A screen reader says the title.
    assert root[0].tag.endswith("title")
    assert re.findall(r"href|url\(|@import|<script", drawing) == []


@pytest.mark.parametrize(
    ("name", "states", "moves"),
    [("slots", EntryState, SLOTS), ("requests", RequestState, REQUESTS)],
    ids=["slots", "requests"],
)
def test_the_states_and_events_of_a_picture_are_those_of_its_table(
    name: str, states: type[EntryState | RequestState], moves: Iterable[tuple[str, str, str]]
) -> None:
    """The events from one state to another are one text, those that leave it as it is another."""
    edges: dict[tuple[str, str], list[str]] = defaultdict(list)
    for begin, end, event in moves:
        edges[begin, end].append(event)
    said = [f"{'↻ ' * (a == b)}{', '.join(events)}" for (a, b), events in edges.items()]
    drawn = ET.fromstring((PICTURES / f"{name}.svg").read_text())
    shown = [str(element.text) for element in drawn.iter() if element.tag.endswith("}text")]
    assert sorted(shown) == sorted([*said, *(state.name for state in states)])
