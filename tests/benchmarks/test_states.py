"""The simulation of states in a bucket: what its rules keep, and what a small trace makes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import states
from benchmarks.simulation.workload import CHUNK_TOKENS
from benchmarks.states import RULES, Memory, Model, Prompt

MODEL = Model("one with large states", state_bytes=3_000, token_bytes=1)
"""A state is as large as the KV of six blocks."""
COLD = Prompt(whole=50, known=7, hit=0, step=4)


@pytest.mark.parametrize(
    ("rule", "kept"),
    [
        ("last", {50}),
        ("branch", {7, 50}),
        ("ends", {*range(4, 50, 4), 50}),
        ("spaced 4", {24, 48, 50}),
        ("ended 4096", {*range(4, 50, 4), *range(8, 50, 8), 50}),
    ],
)
def test_the_states_that_a_rule_keeps(rule: str, kept: set[int]) -> None:
    assert RULES[rule](COLD, MODEL) == kept


def test_the_least_recently_used_leave_and_states_with_their_blocks() -> None:
    for together in (False, True):
        memory = Memory(40, together=together)
        for place in b"ab":
            memory.put(("kv", bytes([place])), 10)
        memory.put(("state", b"a"), 20)
        memory.put(("kv", b"c"), 10)
        assert ("kv", b"a") not in memory
        assert (("state", b"a") in memory) is not together
        assert memory.nbytes == (20 if together else 40)


def chats(path: Path) -> Path:
    """Ten chats that take turns, and grow by two blocks with each."""
    lines, new = [], iter(range(1, 1_000))
    histories: list[list[int]] = [[0] for _ in range(10)]
    for turn in range(100):
        history = histories[turn % 10]
        history += [next(new), next(new)]
        length = len(history) * CHUNK_TOKENS + 1
        line = {"timestamp": turn * 3000, "input_length": length, "output_length": 1}
        lines.append(json.dumps(line | {"hash_ids": history}))
    path.write_text("\n".join(lines))
    return path


def test_of_chats_that_grow_the_last_states_are_all_that_is_hit(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    arguments = ["--batch-tokens", "2048", "--bucket-gib", "0", "--host-gib", "1"]
    states.main(["--trace", str(chats(tmp_path / "trace")), "--json", str(out), *arguments])
    document: dict[str, Any] = json.loads(out.read_text())
    runs = {run["rule"]: run for run in document["bucket"] if run["model"].startswith("Granite")}
    assert runs["last"]["hit_percent"] == 82.49, "each turn, all of the turn before"
    for rule in ("spaced 4", "ends"):
        assert runs[rule] == runs["last"] | {"rule": rule}
    assert runs["ended 512"]["states"] > runs["last"]["states"] == 100
    assert {run["order"] for run in document["host"]} == set(states.ORDERS)
