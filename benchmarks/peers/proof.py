"""Whether a pass did the work its times are shown for. Pure: a figure is told or it is not."""

from __future__ import annotations

from collections.abc import Sequence

from lab.engine import Answer

OTHER_TOKENS = 0.25
"""Share of the prompts that may have other tokens where several are served at once."""


def faults(
    answers: Sequence[Answer],
    reference: Sequence[Answer],
    connector_hit_tokens: int,
    users: int = 1,
) -> list[str]:
    """What is wrong with `answers`; nothing if they are as good as the reference.

    reference: the same prompts in an engine without a connector, computed for a cold pass, hit in
        its own cache for a warm one. Of one user, tokens and hit lengths have to be the same. Of
        several, batches differ from run to run, and so may the last bits of a result; and a
        connector may find that computing is faster than waiting.
    connector_hit_tokens: what the engine counted as hit in the connector: all that was hit, so that
        nothing came from a cache of the engine's own.
    """
    found, others = [], []
    for number, (answer, right) in enumerate(zip(answers, reference, strict=True)):
        if answer.finish_reason != right.finish_reason:
            found.append(f"prompt {number}: ended by {answer.finish_reason!r}")
        if answer.cached_tokens != right.cached_tokens and users == 1:
            found.append(
                f"prompt {number}: {answer.cached_tokens} tokens hit, not {right.cached_tokens}"
            )
        if answer.tokens != right.tokens:
            others.append(f"prompt {number}: other tokens than without a connector")
    if users == 1 or len(others) > OTHER_TOKENS * len(answers):
        found += others
    hit = sum(answer.cached_tokens or 0 for answer in (reference if users == 1 else answers))
    if connector_hit_tokens != hit:
        found.append(f"{connector_hit_tokens} tokens hit in the connector, not {hit}")
    return found


def hit_percent(answers: Sequence[Answer], reference: Sequence[Answer]) -> float:
    """Tokens hit, of those that the reference has hit; 0.0 where it has hit none."""
    hit, right = (sum(a.cached_tokens or 0 for a in all_) for all_ in (answers, reference))
    return 100.0 * hit / right if right else 0.0
