"""The judge of a proof, by cases: what is ok, what is wrong, and in which words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from s3kv.prove.judge import (
    LEAST_MOVE,
    NEAR_TIE,
    OTHER_SHAPE_MOVE,
    ArmAnswer,
    ArmFacts,
    Judgement,
    compare,
    judge,
)

TOKENS = (5, 6, 7, 8)
WAIT_S = 10.0


def answer(tokens: Sequence[int] = TOKENS, *, moved: float = 0.0, **changes: object) -> ArmAnswer:
    """An answer whose candidates are its tokens (at -0.1) and token 1 (at -3)."""
    logprobs = [{token: -0.1 + moved, 1: -3.0 + moved} for token in tokens]
    return replace(ArmAnswer(tokens, logprobs, found=True, ttft_s=1.0), **changes)  # type: ignore[arg-type]


def facts(*answers: ArmAnswer, engine: int = 0, connector: int = 0, **changes: object) -> ArmFacts:
    held = ArmFacts(answers or (answer(),), 1_000, engine, connector)
    return replace(held, **changes)  # type: ignore[arg-type]


HONEST = {
    "off": facts(),
    "engine": facts(engine=992),
    "cold": facts(bucket_bytes=0),
    "host": facts(connector=992, bucket_bytes=0),
    "restart": facts(connector=700, engine=292, bucket_bytes=4096),
    "away": facts(bucket_bytes=0),
}


def judged(**arms: ArmFacts) -> Judgement:
    return judge(HONEST | arms, WAIT_S)


def wrong(judgement: Judgement) -> list[tuple[str, str]]:
    return [(one.arm, one.text) for one in judgement.findings if one.failed]


def test_honest_arms_are_proven_without_a_word() -> None:
    judgement = judged()
    assert judgement.proven
    assert judgement.findings == []
    assert judgement.margin == LEAST_MOVE


@pytest.mark.parametrize(
    ("arms", "text"),
    [
        ({"engine": facts()}, "prefix cache served 0 of"),
        ({"off": facts(engine=16)}, "the engine's prefix cache was on"),
        ({"cold": facts(connector=256)}, "had nothing to serve"),
        ({"away": facts(connector=256)}, "had nothing to serve"),
        ({"restart": facts(bucket_bytes=0)}, "nothing was served: every prompt was computed"),
        ({"restart": facts(engine=900)}, "nothing was served"),
        ({"restart": facts(connector=256)}, "only 256 of 1,000 prompt tokens were served"),
        ({"restart": facts(connector=992, bucket_bytes=0)}, "nothing was fetched"),
        ({"host": facts(connector=992, bucket_bytes=1)}, "host memory did not hold"),
        ({"away": facts(error="the engine has ended")}, "the engine has ended"),
        ({"away": facts(answer(ttft_s=WAIT_S + 5.1))}, "first token after 15.1 s, limit 15.0"),
        ({"away": facts(answer(complete=False))}, "1 of 1 answers did not come to their end"),
        ({"cold": facts(answer(found=False))}, "was missed, and found in off"),
        ({"cold": facts(answer(moved=0.021))}, "logprobs moved by 0.021, margin 0.020"),
        ({"cold": facts(answer(moved=float("nan")))}, "logprobs moved by inf, margin 0.020"),
        ({"engine": facts(answer(moved=0.3), engine=992)}, "moved by 0.300, margin 0.250"),
        ({"cold": facts(answer((5, 6, 9, 8)))}, "token 3 is another than in off, and no near"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_an_arm_is_wrong(arms: Mapping[str, ArmFacts], text: str) -> None:
    judgement = judged(**arms)
    assert not judgement.proven
    assert any(arm in arms and text in said for arm, said in wrong(judgement)), wrong(judgement)


def tie(gap: float) -> tuple[ArmAnswer, ArmAnswer]:
    """Two answers that part at the second token, which each prefers by the gap."""
    shared = {5: -0.1, 1: -3.0}
    mine, theirs = {6: -0.6, 9: -0.6 - gap}, {9: -0.6, 6: -0.6 - gap}
    own = answer((5, 6, 7), logprobs=[shared, mine, {7: -0.1}])
    return own, answer((5, 9, 2), logprobs=[shared, theirs, {2: -0.1}])


def test_a_near_tie_is_told_from_wrong_kv() -> None:
    own, other = tie(0.125)
    compared = compare(own, other)
    assert (compared.diverged, compared.gap) == (1, pytest.approx(0.125))
    assert compared.move == pytest.approx(0.125 / 2)  # two of four logprobs, by the gap
    noisy = {"off": facts(other), "engine": facts(own, engine=992)}
    judgement = judge(noisy | {"cold": facts(own), "away": facts(own)}, WAIT_S)
    assert judgement.proven
    told = "other tokens than in off from a near tie on: 1"
    assert [one.text for one in judgement.findings] == [told] * 3


def test_a_code_lost_in_a_near_tie_is_noted_and_otherwise_wrong() -> None:
    own, other = tie(0.125)
    arms = {"off": facts(other), "engine": facts(replace(own, found=False), engine=992)}
    assert judge(arms, WAIT_S).proven
    assert any("was missed" in one.text for one in judge(arms, WAIT_S).findings)
    own, other = tie(NEAR_TIE + 0.1)
    arms = {"off": facts(other), "engine": facts(own, engine=992)}
    assert any("no near tie" in said for _, said in wrong(judge(arms, WAIT_S)))


def test_a_token_the_other_arm_does_not_list_is_no_tie() -> None:
    assert compare(answer((5, 9)), answer((5, 6))).gap == float("inf")


def test_the_margin_follows_the_noise_of_the_engine() -> None:
    judgement = judged(engine=facts(answer(moved=0.05), engine=992))
    assert (judgement.noise, judgement.margin) == (pytest.approx(0.05), pytest.approx(0.1))


def test_another_served_length_has_its_own_margin() -> None:
    for moved, proven in ((OTHER_SHAPE_MOVE - 0.01, True), (OTHER_SHAPE_MOVE + 0.01, False)):
        partly = facts(answer(moved=moved, cached_tokens=256), connector=992, bucket_bytes=1)
        assert judged(restart=partly).proven is proven


def test_a_missing_answer_is_wrong() -> None:
    two = {name: replace(one, answers=(answer(), answer())) for name, one in HONEST.items()}
    judgement = judge(two | {"restart": HONEST["restart"]}, WAIT_S)
    assert wrong(judgement) == [("restart", "1 of 2 answers came")]


def test_another_connector_need_not_begin_empty() -> None:
    assert judge(HONEST | {"cold": facts(connector=992)}, WAIT_S, empty=False).proven


def test_a_model_that_finds_no_code_is_noted() -> None:
    blind = {name: replace(one, answers=(answer(found=False),)) for name, one in HONEST.items()}
    judgement = judge(blind, WAIT_S)
    assert judgement.proven
    assert [one.arm for one in judgement.findings] == ["off"]
