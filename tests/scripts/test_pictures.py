"""The pictures show what the tables hold."""

from __future__ import annotations

import re
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest

from s3kv.host.table import TRANSITIONS, EntryState
from s3kv.planning.requests import REQUEST_TRANSITIONS, RequestState
from scripts import pictures, processes


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


def test_the_bars_are_as_long_as_the_times_recorded() -> None:
    medians = pictures.recorded("engine-shaped.json")["median_ms"]
    bars = [
        float(e.get("width", "0"))
        for e in ET.fromstring(pictures.engine_bars()).iter("{http://www.w3.org/2000/svg}rect")
        if e.get("height") == "24"
    ]
    shown = [medians[key] for key in ("none", "cold", "warm", "local")]
    assert [b / max(bars) for b in bars] == pytest.approx([m / max(shown) for m in shown], abs=1e-3)


@pytest.mark.parametrize("entry", processes.ENTRIES.values())
def test_a_process_is_shown_with_what_it_imports(entry: str) -> None:
    found = processes.folders(entry)
    assert ", ".join(found) in texts(processes.processes())
    # Layers that no import may cross, from pyproject.toml.
    assert ("planning" in found) == ("connectors" in found)
    assert "library" not in found
    assert "cli" not in found


def test_the_imports_shown_are_those_that_python_makes() -> None:
    script = "import sys, s3kv.io.__main__; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    loaded = {name.split(".")[1] for name in done.stdout.split() if name.count(".") > 1
              and name.startswith("s3kv.")}  # fmt: skip
    assert loaded <= set(processes.folders("s3kv.io.__main__"))
    assert {"host", "io", "objects"} <= loaded
