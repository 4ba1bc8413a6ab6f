"""What the engine has to show on a GPU."""

from __future__ import annotations

import pytest

from lab.engine import Answer
from scripts.gpu import engine

pytest.importorskip("vllm")


WORK = engine.WORKS["tiny"]


def answer(cached_tokens: int) -> Answer:
    return Answer([1, 2], cached_tokens, 0.1, 0.2, "length")


def test_other_tokens_and_shorter_hits_are_noticed() -> None:
    whole, none = answer(WORK.hit_tokens), answer(0)
    assert engine.same([whole], [whole])
    assert not engine.same([whole], [Answer([1, 3], WORK.hit_tokens, 0.1, 0.2, "length")])
    assert not engine.same([whole, whole], [whole, answer(WORK.hit_tokens - 1)])
    assert not engine.same([none], [none])
    good: dict[str, object] = {"equal": True, "left": [{}, {}], "broken": []}
    assert engine.well(good)
    for worse in (
        {"equal": False},
        {"equal": None},
        {"left": [{}, {"jobs": 1}]},
        {"broken": ["a hook"]},
    ):
        assert not engine.well(good | worse)


def test_the_tiers_are_compared_as_they_come() -> None:
    whole, wrong = [answer(WORK.hit_tokens)], [answer(0)]
    answers = {"cold": wrong, "engine": whole}
    assert engine.compared(answers, WORK)["equal"] is None
    assert engine.compared(answers | {"host": wrong}, WORK)["equal"] is False
    answers["host"] = whole
    assert engine.compared(answers, WORK)["equal"] is None
    assert engine.compared(answers | {"bucket": whole}, WORK)["equal"] is True
    assert engine.compared(answers | {"bucket": wrong}, WORK)["equal"] is False
    assert list(engine.compared(answers, WORK)["cached_tokens"]) == ["cold", "engine", "host"]
