"""Prompts of a proof: lengths, planted codes, shared beginnings."""

from __future__ import annotations

import re

import pytest

from s3kv.prove.prompts import BOUNDARY_TOKENS, LEAST_TOKENS, TAIL_TOKENS, make_prompts

WORDS: dict[str, int] = {}


def encode(text: str) -> list[int]:
    """A tokenizer of words, marks and digits."""
    return [WORDS.setdefault(word, len(WORDS)) for word in re.findall(r"\d|\w+|\W", text)]


@pytest.mark.parametrize("longest", [LEAST_TOKENS, 1_000, 4_096, 5_000])
def test_a_prompt_plants_its_code_once_and_asks_for_it(longest: int) -> None:
    for prompt in make_prompts(encode, longest, 8, seed=0):
        text = "".join(list(WORDS)[token] for token in prompt.tokens)
        assert text.count(prompt.code) == 1
        subject = re.search(rf"the code of ([\w ]+) is {prompt.code}\."[1:], text)
        assert text.endswith(f"the code of {subject[1]} is")
        assert len(prompt.tokens) <= longest
        assert len(prompt.tokens) % BOUNDARY_TOKENS == TAIL_TOKENS
        at = text.index(prompt.code) / len(text)
        assert abs(at - prompt.depth) < 0.15 or longest < 2_000


def test_lengths_differ_and_some_prompts_share_half() -> None:
    prompts = [prompt.tokens for prompt in make_prompts(encode, 4_096, 8, seed=0)]
    assert [len(tokens) for tokens in prompts] == [3848, 3848, 2056, 2056, 3080, 3080, 1032, 1032]
    shared = [
        number
        for number, (one, before) in enumerate(zip(prompts[1:], prompts, strict=False), 1)
        if one[: len(one) // 2] == before[: len(one) // 2]
    ]
    assert shared == [3, 7]


def test_the_seed_decides() -> None:
    assert make_prompts(encode, 1_000, 3, 7) == make_prompts(encode, 1_000, 3, 7)
    assert make_prompts(encode, 1_000, 3, 7) != make_prompts(encode, 1_000, 3, 8)


def test_a_model_that_is_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match="prompts need 520 tokens, and 519 fit"):
        make_prompts(encode, LEAST_TOKENS - 1, 1, 0)
