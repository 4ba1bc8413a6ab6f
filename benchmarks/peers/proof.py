"""Whether a pass did the work its times are shown for. Pure: a figure is told or it is not."""

from __future__ import annotations

from collections.abc import Sequence

from lab.engine import Answer


def faults(
    answers: Sequence[Answer], reference: Sequence[Answer], connector_hit_tokens: int
) -> list[str]:
    """What is wrong with `answers`; nothing if they are as good as the reference.

    reference: the same prompts in an engine without a connector, computed for a cold pass, hit in
        its own cache for a warm one. Tokens and hit lengths have to be the same.
    connector_hit_tokens: what the engine counted as hit in the connector: all that was hit, so that
        nothing came from a cache of the engine's own.
    """
    found = []
    for number, (answer, right) in enumerate(zip(answers, reference, strict=True)):
        if answer.finish_reason != right.finish_reason:
            found.append(f"prompt {number}: ended by {answer.finish_reason!r}")
        if answer.cached_tokens != right.cached_tokens:
            found.append(
                f"prompt {number}: {answer.cached_tokens} tokens hit, not {right.cached_tokens}"
            )
        if answer.tokens != right.tokens:
            found.append(f"prompt {number}: other tokens than without a connector")
    hit = sum(answer.cached_tokens or 0 for answer in reference)
    if connector_hit_tokens != hit:
        found.append(f"{connector_hit_tokens} tokens hit in the connector, not {hit}")
    return found
