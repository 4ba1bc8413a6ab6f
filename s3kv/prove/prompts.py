"""Prompts of a proof: long invented documents, each with a planted code that the prompt requests at
its end. Pure: the same seed and tokenizer give the same prompts.

A prompt ends a few tokens after a multiple of `BOUNDARY_TOKENS`. The prefix that a cache can serve
then has the same length for every cache unit that divides the boundary. So all arms that are served
compute the same tokens in the same shape, and their logprobs can be compared closely.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle, islice

BOUNDARY_TOKENS = 256
TAIL_TOKENS = 8
"""Tokens after the last boundary: fewer than a vLLM block has."""
LEAST_TOKENS = 2 * BOUNDARY_TOKENS + TAIL_TOKENS
"""The shortest prompt: one boundary would leave no room for a depth."""
LENGTHS = (1.0, 0.5, 0.75, 0.25)
"""Lengths of the prompts as parts of the longest, in turn."""
DEPTHS = (0.1, 0.85, 0.35, 0.6)
"""Depths of the planted codes as parts of the document, in turn."""
_SHARING = 4
"""One of so many prompts begins with half of the prompt before it."""

_WHO = ("keeper", "miller", "pilot", "weaver", "clerk", "gardener", "sailor", "printer", "mason")
_DID = ("painted", "counted", "mended", "carried", "measured", "described", "sold", "washed")
_WHAT = ("ladder", "barrel", "lantern", "map", "clock", "basket", "bell", "mirror", "wheel", "coat")
_HOW = ("green", "heavy", "narrow", "broken", "round", "silver", "wooden", "old", "small", "bright")
_WHERE = ("harbour", "library", "orchard", "station", "market", "bridge", "tower", "meadow", "mill")
_WHEN = ("before noon", "in the evening", "on a Monday", "after the rain", "in silence", "twice")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt. code: the planted digits that it requests. depth: their place, from 0 to 1."""

    tokens: list[int]
    code: str
    depth: float


def make_prompts(
    encode: Callable[[str], list[int]], longest_tokens: int, count: int, seed: int
) -> list[Prompt]:
    """`count` prompts of at most `longest_tokens`. encode: tokenizer, without special tokens.
    Raises `ValueError` if the longest is shorter than `LEAST_TOKENS`."""
    if longest_tokens < LEAST_TOKENS:
        raise ValueError(f"prompts need {LEAST_TOKENS} tokens, and {longest_tokens} fit")
    draw, made = random.Random(seed), list[Prompt]()
    # Each length twice, so that a prompt that shares its beginning is as long as the one before.
    lengths = (part for part in cycle(LENGTHS) for _ in range(2))
    shapes = zip(lengths, cycle(DEPTHS), strict=False)
    most = (longest_tokens - TAIL_TOKENS) // BOUNDARY_TOKENS
    for number, (part, depth) in enumerate(islice(shapes, count)):
        boundaries = min(most, max(2, int(longest_tokens * part) // BOUNDARY_TOKENS))
        shared = number % _SHARING == _SHARING - 1
        first = made[-1].tokens[: len(made[-1].tokens) // 2] if shared else []
        made.append(_prompt(encode, boundaries * BOUNDARY_TOKENS + TAIL_TOKENS, depth, first, draw))
    return made


def _prompt(
    encode: Callable[[str], list[int]],
    length: int,
    depth: float,
    first: list[int],
    draw: random.Random,
) -> Prompt:
    """A prompt of `length` tokens that begins with `first`, which may contain its own code."""
    subject = f"{draw.choice(_HOW)} {draw.choice(_WHAT)} of the {draw.choice(_WHO)}"
    code = str(draw.randrange(10_000, 100_000))
    needle = encode(f" The code of the {subject} is {code}.")
    question = encode(f"\n\nAs written above, the code of the {subject} is")
    room = length - len(first) - len(needle) - len(question)
    text = list[int]()
    while len(text) < room:
        who, did, how, what = (draw.choice(words) for words in (_WHO, _DID, _HOW, _WHAT))
        where, when = draw.choice(_WHERE), draw.choice(_WHEN)
        text += encode(f" The {who} {did} the {how} {what} near the {where} {when}.")
    text = text[:room]
    at = min(room, max(0, round(depth * length) - len(first)))
    return Prompt([*first, *text[:at], *needle, *text[at:], *question], code, depth)
