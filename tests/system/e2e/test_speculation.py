"""Speculative decoding crossed with the cache, on the real engine.

Drafts that are rejected leave KV behind, which the next step overwrites. A draft model keeps KV of
its own in the same blocks: if what is read of it were wrong, fewer of its drafts would be accepted.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from lab import models
from lab.engine import Answer, Engine
from tests.system.e2e.conftest import START_AND_STOP_S, Rig, at_rest, cached, tokens

PROMPTS = models.prompts(2, 500, seed=60)
HIT = 384
MORE = models.prompts(2, 20, seed=61)
ANSWER = 24
"""Tokens of an answer, which ends in another block than its prompt."""
WITH_ANSWER = 512


class Drafted(NamedTuple):
    """Answers, and how many tokens were drafted and accepted for them."""

    answers: list[Answer]
    drafts: float
    accepted: float


def drafted(engine: Engine, prompts: list[list[int]]) -> Drafted:
    def count(name: str) -> float:
        return engine.metrics()[f"vllm:spec_decode_num_{name}_tokens_total"]

    before = count("draft"), count("accepted")
    answers = engine.generate(prompts, max_tokens=ANSWER)
    return Drafted(answers, count("draft") - before[0], count("accepted") - before[1])


@pytest.mark.nightly
@pytest.mark.timeout(3 * START_AND_STOP_S)
@pytest.mark.parametrize("method", ["draft_model", "ngram"])
def test_every_tier_gives_the_tokens_and_the_drafts_of_a_local_hit(rig: Rig, method: str) -> None:
    """The draft model is the model itself, so that its drafts are accepted if its KV is right. Of
    tokens that follow others in a random prompt hardly any is."""
    found = {"model": str(rig.tiny)} if method == "draft_model" else {"prompt_lookup_min": 1}
    speculation = {"method": method, "num_speculative_tokens": 3, **found}
    args: dict[str, Any] = {"dtype": "float32", "speculative_config": speculation}
    expected = rig.truth(PROMPTS, ANSWER)
    turns = [a + b + c for a, b, c in zip(PROMPTS, expected, MORE, strict=True)]
    after = rig.truth(turns, ANSWER)
    with rig.serve(rig.tiny, rig.patient, **args) as engine:
        assert tokens(engine.generate(PROMPTS, max_tokens=ANSWER)) == expected
        local = drafted(engine, turns), drafted(engine, PROMPTS)
        at_rest(engine)
        engine.reset_prefix_cache()
        host = [drafted(engine, turns)]
        engine.reset_prefix_cache()
        host.append(drafted(engine, PROMPTS))
        at_rest(engine)
    with rig.serve(rig.tiny, rig.patient, **args) as engine:
        warm = [drafted(engine, turns)]
        assert at_rest(engine)["hit_tokens_bucket"] == 2 * WITH_ANSWER
        engine.reset_prefix_cache()
        warm.append(drafted(engine, PROMPTS))
        at_rest(engine)
    for then, now in (local, host, warm):
        assert tokens(now.answers) == expected
        assert tokens(then.answers) == after
        assert cached(now.answers) == [HIT] * 2
        assert cached(then.answers) == [WITH_ANSWER] * 2
        assert (then[1:], now[1:]) == (local[0][1:], local[1][1:])
    first = local[0]
    assert first.drafts > 0
    if method == "draft_model":
        assert first.accepted > first.drafts / 2
    else:
        assert first.accepted < first.drafts
