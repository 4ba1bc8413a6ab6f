"""Judge of a proof: facts of the arms in, findings out. Pure.

An arm is judged against the arm that computed or found the same tokens in the same shape:

    arm            against   prompt tokens served
    off            -         none
    engine         off       at least half by the engine's prefix cache
    cold           off       none by the connector: its prefix is empty
    host           engine    at least half by the connector, none fetched from the bucket
    restart, tp    engine    at least half by the connector, bytes fetched from the bucket
    away           off       none by the connector, within the deadline

    the answer of a prompt                                                           finding
    same tokens, logprobs moved within the margin                                    ok
    other tokens from a near tie on, logprobs before it moved within the margin      ok, counted
    other tokens, not from a near tie on                                             wrong
    logprobs moved beyond the margin, whatever the tokens                            wrong
    as before, where another length of the prompt was served: by its own margin      wrong
    the planted code found in one arm alone, explained by such a near tie            ok, noted
    the planted code found in one arm alone, otherwise                               wrong
    an answer that is missing, or did not end by its length                          failed

A *near tie*: each arm prefers its own token there by at most `NEAR_TIE`. The *move* of a prompt is
the mean absolute difference of the logprobs of the candidates that both arms report, over the
positions whose preceding tokens are equal. It is infinite if one of these is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

NEAR_TIE = 0.5
"""Nats. A bf16 logit of 16 to 32 has steps of 1/8: two steps for each of the two candidates. Of two
runs of one engine with other shapes, single logprobs differ by up to 0.3."""
LEAST_MOVE = 0.02
"""Nats. The least margin of a move: an engine with atomics is no more repeatable than this."""
NOISE_FACTOR = 2.0
"""The margin of a move, in multiples of the noise: the largest move between `off` and `engine`,
which share no cache of ours. A move averages some hundred logprobs, so moves of equal arms differ
by less than this factor."""
OTHER_SHAPE_MOVE = 0.15
"""Nats. The least margin of an answer if another length of its prompt was served than in its
reference: the rest is computed in another shape, and bf16 rounds differently. Equal arms of a
135M model then move by 0.04 to 0.08."""
MOST_NOISE = 0.25
"""Nats. With more noise the engine is no reference: its own prefix cache changes the answers."""
LEAST_SHARE = 0.5
"""Share of the prompt tokens that an arm must be served for the test to count."""
LATE_FACTOR = 5.0
"""Limit of TTFT in `away`, in multiples of that in `off`, plus the longest wait of a request."""

REFERENCES: Mapping[str, str] = {
    "engine": "off",
    "cold": "off",
    "away": "off",
    "host": "engine",
    "restart": "engine",
    "tp": "engine",
}
LOADING = ("host", "restart", "tp")


@dataclass(frozen=True, slots=True)
class ArmAnswer:
    """The answer to one prompt. logprobs: for each position, those of the candidates by token.
    found: whether it contains the planted code. complete: whether it ended by its length.
    cached_tokens: prompt tokens that were served, not computed."""

    tokens: Sequence[int]
    logprobs: Sequence[Mapping[int, float]]
    found: bool
    ttft_s: float
    complete: bool = True
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ArmFacts:
    """Facts of one arm, of its last pass. engine_tokens, connector_tokens: prompt tokens that the
    engine's prefix cache and the connector served. bucket_bytes: fetched and verified; None:
    unknown. error: why it ended early; empty if it did not. counters: increases of the engine's
    counters. cpu_s: of all processes of the arm."""

    answers: Sequence[ArmAnswer] = ()
    prompt_tokens: int = 0
    engine_tokens: int = 0
    connector_tokens: int = 0
    bucket_bytes: int | None = None
    error: str = ""
    counters: Mapping[str, float] = field(default_factory=dict)
    cpu_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Comparison:
    """One answer compared with its reference. diverged: the first position with another token; None
    if there is none. gap: the larger of both arms' preferences for its own token there, in nats;
    infinite if an arm does not list the other's token. move: see the module."""

    diverged: int | None
    gap: float
    move: float


@dataclass(frozen=True, slots=True)
class Remark:
    """One finding on an arm. failed: the arm proves nothing. wrong: it has changed an answer."""

    arm: str
    failed: bool
    text: str
    wrong: bool = False


@dataclass(frozen=True, slots=True)
class Judgement:
    """The outcome. noise, margin: moves, in nats. comparisons: by arm, then by prompt."""

    findings: list[Remark]
    noise: float
    margin: float
    comparisons: dict[str, list[Comparison]] = field(default_factory=dict)

    @property
    def proven(self) -> bool:
        return not any(finding.failed for finding in self.findings)


def compare(answer: ArmAnswer, reference: ArmAnswer) -> Comparison:
    """Compare two answers to one prompt."""
    pairs = enumerate(zip(answer.tokens, reference.tokens, strict=False))
    diverged = next((at for at, (own, other) in pairs if own != other), None)
    last = len(answer.tokens) if diverged is None else diverged + 1
    moves = [
        abs(mine[token] - theirs[token])
        for mine, theirs in zip(answer.logprobs[:last], reference.logprobs[:last], strict=False)
        for token in mine.keys() & theirs.keys()
    ]
    gap = 0.0
    if diverged is not None:
        own, other = answer.tokens[diverged], reference.tokens[diverged]
        mine, theirs = answer.logprobs[diverged], reference.logprobs[diverged]
        known = other in mine and own in theirs
        gap = max(mine[own] - mine[other], theirs[other] - theirs[own]) if known else math.inf
    move = fmean(moves) if moves else math.inf
    if math.isnan(move):  # NaN never exceeds a margin
        gap = move = math.inf
    return Comparison(diverged, gap, move)


def judge(arms: Mapping[str, ArmFacts], longest_wait_s: float, *, empty: bool = True) -> Judgement:
    """Judge the arms, which include `off` and `engine`. longest_wait_s: of a request for the
    bucket. empty: whether the connector had nothing stored when `cold` began."""
    compared = {
        name: [*map(compare, facts.answers, arms[REFERENCES[name]].answers)]
        for name, facts in arms.items()
        if name in REFERENCES
    }
    noise = max((one.move for one in compared["engine"]), default=math.inf)
    margin = max(LEAST_MOVE, NOISE_FACTOR * noise)
    findings = []
    for name, facts in arms.items():
        findings += [Remark(name, True, text) for text in _failures(name, facts, empty=empty)]
        if name in compared and not facts.error:
            limit = MOST_NOISE if name == "engine" else margin
            findings += _differences(name, facts, arms[REFERENCES[name]], compared[name], limit)
    if "away" in arms:
        findings += _lateness(arms["away"], arms["off"], longest_wait_s)
    if not any(answer.found for answer in arms["off"].answers):
        text = "the model finds no planted code: this comparison proves nothing"
        findings.append(Remark("off", False, text))
    return Judgement(findings, noise, margin, compared)


def _failures(name: str, facts: ArmFacts, *, empty: bool) -> Iterator[str]:
    """Reasons why an arm did not do what its name promises."""
    if facts.error:
        yield facts.error
        return
    if incomplete := sum(not answer.complete for answer in facts.answers):
        yield f"{incomplete} of {len(facts.answers)} answers did not come to their end"
    least = LEAST_SHARE * facts.prompt_tokens
    served = f"of {facts.prompt_tokens:,} prompt tokens"
    if name == "engine" and facts.engine_tokens < least:
        yield f"the engine's prefix cache served {facts.engine_tokens:,} {served}"
    if name in LOADING:
        together = facts.engine_tokens + facts.connector_tokens
        if not facts.connector_tokens:
            yield "nothing was served: every prompt was computed"
        elif together < least:
            yield f"only {together:,} {served} were served"
        elif name != "host" and facts.bucket_bytes == 0:
            yield "nothing was fetched from the bucket"
        elif name == "host" and facts.bucket_bytes:
            yield "it was served from the bucket: host memory did not hold the prompts"
    elif facts.connector_tokens and (name != "cold" or empty):
        yield f"the connector served {facts.connector_tokens:,} tokens, and had nothing to serve"
    if name == "off" and facts.engine_tokens:
        yield "the engine's prefix cache was on"


def _differences(
    name: str, facts: ArmFacts, reference: ArmFacts, comparisons: Sequence[Comparison], limit: float
) -> Iterator[Remark]:
    against = REFERENCES[name]
    if len(comparisons) < len(reference.answers):
        yield Remark(name, True, f"{len(comparisons)} of {len(reference.answers)} answers came")
    ties = 0
    pairs = zip(facts.answers, reference.answers, strict=False)
    for number, (one, (answer, other)) in enumerate(zip(comparisons, pairs, strict=False), 1):
        said = f"prompt {number}: "
        tie = one.diverged is not None and one.gap <= NEAR_TIE
        if answer.found != other.found:
            found = ("found", "missed") if answer.found else ("missed", "found")
            text = f"{said}the planted code was {found[0]}, and {found[1]} in {against}"
            yield Remark(name, not tie, text, not tie)
        alike = answer.cached_tokens == other.cached_tokens
        most = limit if alike else max(limit, OTHER_SHAPE_MOVE)
        if one.move > most:
            text = f"{said}logprobs moved by {one.move:.3f}, margin {most:.3f}"
            yield Remark(name, True, text, True)
        if one.diverged is not None and one.gap > NEAR_TIE:
            text = f"{said}token {one.diverged + 1} is another than in {against}, and no near tie "
            yield Remark(name, True, f"{text}(preferred by {one.gap:.2f}, margin {NEAR_TIE})", True)
        ties += tie
    if ties:
        yield Remark(name, False, f"other tokens than in {against} from a near tie on: {ties}")


def _lateness(away: ArmFacts, off: ArmFacts, longest_wait_s: float) -> Iterator[Remark]:
    for number, (answer, other) in enumerate(zip(away.answers, off.answers, strict=False), 1):
        limit_s = longest_wait_s + LATE_FACTOR * other.ttft_s
        if answer.ttft_s > limit_s:
            text = f"prompt {number}: first token after {answer.ttft_s:.1f} s, limit {limit_s:.1f}"
            yield Remark("away", True, text)
