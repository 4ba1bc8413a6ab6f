"""The pictures show what the tables hold."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

from s3kv.host.table import TRANSITIONS, EntryState
from s3kv.planning.requests import REQUEST_TRANSITIONS, RequestState
from scripts import pictures


def texts(drawing: str) -> list[str]:
    return [element.text or "" for element in ET.fromstring(drawing).iter() if element.text]


@pytest.mark.parametrize("name", pictures.ALL)
def test_a_picture_is_well_formed_and_needs_nothing_from_elsewhere(name: str) -> None:
    drawing = pictures.ALL[name]()
    root = ET.fromstring(drawing)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    # A screen reader says the title.
    assert root[0].tag.endswith("title")
    assert re.findall(r"href|url\(|@import|<script", drawing) == []


def test_every_event_of_a_slot_is_in_its_picture() -> None:
    said = texts(pictures.slots())
    assert {state.name for state in EntryState} <= set(said)
    edges = pictures.slot_edges()
    assert sum(map(len, edges.values())) == sum(map(len, TRANSITIONS.values()))
    for events in edges.values():
        assert any(text.removeprefix("↻ ") == ", ".join(events) for text in said), events


def test_every_event_of_a_request_is_in_its_picture() -> None:
    said = texts(pictures.requests())
    assert {state.name for state in RequestState} <= set(said)
    edges = pictures.request_edges()
    assert sum(map(len, edges.values())) == len(REQUEST_TRANSITIONS)
    for events in edges.values():
        assert any(text.removeprefix("↻ ") == ", ".join(events) for text in said), events
