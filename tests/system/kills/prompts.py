"""The prompts of every life, known to all processes by the same ids."""

from __future__ import annotations

from tests.system.sim.meaning import Dictionary

PROMPTS = [
    [ord(letter)] * fork + [ord(tail)] * (length - fork)
    for letter in "ab"
    for fork in (8, 16)
    for tail in "xyz"
    for length in (24, 37)
]
NEW_TOKENS = 4


def dictionary() -> Dictionary:
    """With all prefixes of all prompts, and of what is sampled after them."""
    words = Dictionary()
    for prompt in PROMPTS:
        words.chain([*prompt, *[7] * NEW_TOKENS])
    return words
