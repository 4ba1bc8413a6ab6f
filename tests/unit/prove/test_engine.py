"""The process of an arm: commands in, lines of answers out."""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Iterator

import pytest

from s3kv.prove import engine


class Echo:
    def __init__(self, settings: dict[str, int]) -> None:
        self._count = settings["count"]

    def say(self, word: str) -> Iterator[dict[str, str]]:
        yield from ({"said": word} for _ in range(self._count))

    def end(self) -> Iterator[dict[str, str]]:
        yield {}


class Open(io.StringIO):
    """Input that does not come to its end: that would kill the process group, the test's own."""

    def __next__(self) -> str:
        line = self.readline()
        while not line:
            time.sleep(60)
        return line


def test_every_command_is_answered_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [{"count": 2}, {"do": "say", "word": "a"}, {"do": "end"}, {"do": "say", "word": "b"}]
    monkeypatch.setattr(sys, "stdin", Open("".join(json.dumps(line) + "\n" for line in lines)))
    monkeypatch.setattr(engine, "ArmEngine", Echo)
    answers = io.StringIO()
    engine.main(answers)
    told = [json.loads(line) for line in answers.getvalue().splitlines()]
    assert told == [{"ready": True}, {"said": "a"}, {"said": "a"}, {}]
