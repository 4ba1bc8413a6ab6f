"""What vLLM offers beside plain requests, crossed with the cache.

Answers of an engine with s3kv are compared with those of one without it that has hit its own cache:
while they are computed and saved, from the bucket in another process, and from host memory. In
float32, where a token does not depend on how long the hit was.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lab import models
from lab.engine import Engine
from lab.s3 import S3Server
from tests.system.e2e.conftest import START_AND_STOP_S, Serve, at_rest, new_bucket, patient_for

ARGS: dict[str, Any] = {
    "dtype": "float32",
    "skip_tokenizer_init": False,
    "enable_lora": True,
    "max_lora_rank": 8,
    "max_loras": 2,
    "enable_prompt_embeds": True,
    "scheduling_policy": "priority",
    # Room for the longest request, and too little for those with priorities.
    "max_model_len": 1_408,
    "num_gpu_blocks_override": 14,
}
# The first test starts all engines.
pytestmark = [pytest.mark.long, pytest.mark.timeout(3 * START_AND_STOP_S)]
PROMPTS = iter(models.prompts(20, 400, seed=40))
HIT = 3 * 128
ADAPTERS = (1, 2)


@dataclass(frozen=True)
class Lives:
    """Engines with the same arguments. cold: saves. warm: starts with an empty memory, and reads
    what `cold` has saved. plain: has no connector."""

    plain: Engine
    cold: Engine
    warm: Engine
    adapters: dict[int, Path]

    def adapter(self, number: int) -> tuple[str, int, str]:
        return (f"adapter-{number}", number, str(self.adapters[number]))

    def check(
        self, asks: list[dict[str, Any]], hits: list[int], **how: Any
    ) -> list[dict[str, Any]]:
        """Serve `asks` in all lives, and compare. hits: the tokens of each that are read. Returns
        the replies of the engine without a connector."""
        served(self.plain, asks)
        expected = served(self.plain, asks)
        for engine in (self.cold, self.warm, self.warm):
            replies = served(engine, asks, **how)
            at_rest(engine)
            assert choices(replies) == choices(expected)
            if engine is self.warm:
                assert [reply["cached"] for reply in replies] == hits
                engine.reset_prefix_cache()
        return expected


def served(engine: Engine, asks: list[dict[str, Any]], **how: Any) -> list[dict[str, Any]]:
    return engine.call("tests.system.e2e.inside_requests:serve", asks=asks, **how)


def choices(replies: list[dict[str, Any]]) -> list[list[list[int]]]:
    return [reply["choices"] for reply in replies]


@pytest.fixture(scope="module")
def lives(
    s3: S3Server, tiny: Path, serve: Serve, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Lives]:
    directory = tmp_path_factory.mktemp("lives")
    model = directory / "model"
    shutil.copytree(tiny, model)
    write_tokenizer(model)
    adapters = {
        number: models.build_adapter(directory / f"adapter-{number}", models.TINY, seed=number)
        for number in ADAPTERS
    }
    with contextlib.ExitStack() as stack:
        patient = patient_for(s3, stack.enter_context(new_bucket(s3)))
        plain = Engine(model, log_path=directory / "plain.log", **ARGS)
        engines = [plain, serve(model, patient, **ARGS), serve(model, patient, **ARGS)]
        lives = Lives(*(stack.enter_context(engine) for engine in engines), adapters)
        for engine in (lives.cold, lives.warm):
            for number in ADAPTERS:
                name, _, path = lives.adapter(number)
                target = "tests.system.e2e.inside:load_adapter"
                assert engine.call(target, name=name, number=number, path=path)
        yield lives


def write_tokenizer(model: Path) -> None:
    """A word of three letters for each token, in order: "aaa", "aab", …"""
    letters = "abcdefghijklmnopqrstuvwxyz"
    names = [a + b + c for a in letters for b in letters for c in letters]
    vocabulary = {name: number for number, name in enumerate(names[: models.VOCABULARY])}
    words = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "aaa"}
    tokenizer = {"version": "1.0", "added_tokens": [], "model": words}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "aab", "unk_token": "aaa"}
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    (model / "tokenizer_config.json").write_text(json.dumps(config))


def test_several_answers_to_one_prompt(lives: Lives) -> None:
    sampling = {"n": 3, "temperature": 1.0, "seed": 7}
    (reply,) = lives.check([{"prompt": next(PROMPTS), "sampling": sampling}], [HIT])
    assert len({tuple(choice) for choice in reply["choices"]}) == 3


def test_structured_output(lives: Lives) -> None:
    prompt = next(PROMPTS)
    asks = [{"prompt": prompt, "sampling": {"regex": "(b[a-z]{2})+"}}, {"prompt": prompt}]
    structured, free = lives.check(asks, [HIT, HIT])
    with_b = range(26 * 26, models.VOCABULARY)
    assert all(token in with_b for token in structured["choices"][0])
    assert structured["choices"] != free["choices"]


def test_logprobs_of_the_prompt_are_computed_and_what_is_computed_is_saved(lives: Lives) -> None:
    prompt = next(PROMPTS)
    asks = [{"prompt": prompt, "sampling": {"prompt_logprobs": 0}}]
    (expected,) = lives.check(asks, [0])
    (reply,) = served(lives.warm, asks)
    assert len(reply["logprobs"]) == len(prompt) - 1
    assert reply["logprobs"] == pytest.approx(expected["logprobs"], abs=1e-3)
    lives.warm.reset_prefix_cache()
    lives.check([{"prompt": prompt}], [HIT])


def test_two_adapters_and_none_with_one_prompt(lives: Lives) -> None:
    """Without an adapter it is served alone: in a batch, vLLM's CPU backend applies one to it."""
    prompt = next(PROMPTS)
    asks = [{"prompt": prompt, "adapter": lives.adapter(number)} for number in ADAPTERS]
    replies = lives.check(asks, [HIT] * 2) + lives.check([{"prompt": prompt}], [HIT])
    assert len({str(reply["choices"]) for reply in replies}) == 3


def test_prompts_of_embeddings(lives: Lives) -> None:
    """To vLLM they have no tokens, and are told apart by their content alone."""
    replies = lives.check([{"embeds": [seed, 400]} for seed in (1, 2)], [HIT] * 2)
    assert replies[0]["choices"] != replies[1]["choices"]


def test_prompts_of_tokens_and_embeddings(lives: Lives) -> None:
    """Of the same ids and embeddings, told apart by which of the two counts where. vLLM alone gives
    all of them the answer of the first (vllm#56655), so its cache is emptied between them."""
    alone = {"embeds": [3, 400]}
    masks = [[True] * 400, [n < 200 for n in range(400)], [n >= 200 for n in range(400)]]
    asks = [alone, *({**alone, "prompt": [0] * 400, "mask": mask} for mask in masks)]
    expected = []
    for ask in asks:
        lives.plain.reset_prefix_cache()
        expected += choices(served(lives.plain, [ask]))
    assert len({str(answers) for answers in expected}) == len(asks)
    for engine in (lives.cold, lives.warm, lives.warm):
        replies = [reply for ask in asks for reply in served(engine, [ask])]
        at_rest(engine)
        assert choices(replies) == expected
        if engine is lives.warm:
            assert [reply["cached"] for reply in replies] == [HIT] * len(asks)
            engine.reset_prefix_cache()


def test_salts(lives: Lives) -> None:
    """What is saved with one salt is read by another process with that salt alone."""
    prompt = next(PROMPTS)
    lives.check([{"prompt": prompt, "salt": "a"}], [HIT])
    (other,) = served(lives.warm, [{"prompt": prompt, "salt": "b"}])
    (none,) = served(lives.warm, [{"prompt": prompt}])
    assert (other["cached"], none["cached"]) == (0, 0)


def test_requests_of_low_priority_are_preempted(lives: Lives) -> None:
    prompts = [next(PROMPTS)[:250] for _ in range(5)]
    # From host memory all begin at once, and overlap however slow the bucket is.
    lives.check([{"prompt": prompt} for prompt in prompts], [128] * 5)
    lives.cold.reset_prefix_cache()
    sampling = {"max_tokens": 100}
    low = [{"prompt": prompt, "priority": 1, "sampling": sampling} for prompt in prompts[:4]]
    high = {"prompt": prompts[4], "priority": 0, "after": 4, "sampling": sampling}
    before = [preemptions(engine) for engine in (lives.cold, lives.warm)]
    lives.check([*low, high], [128] * 5)
    after = [preemptions(engine) for engine in (lives.cold, lives.warm)]
    assert all(a > b for a, b in zip(after, before, strict=True))


def preemptions(engine: Engine) -> float:
    return engine.metrics()["vllm:num_preemptions_total"]


def test_running_requests_survive_a_reset_of_the_engine_s_own_cache(lives: Lives) -> None:
    """They are preempted in the middle, and read their prompts again."""
    lives.check([waiting_for_a_reset() for _ in range(2)], [HIT] * 2, reset_at=8)


def test_running_requests_survive_a_reset_of_all_caches(lives: Lives) -> None:
    """They compute their prompts again, and save nothing: they may hold KV from before. This test
    is the last, because the engines share nothing after it."""
    asks = [waiting_for_a_reset() for _ in range(2)]
    expected = choices(served(lives.plain, asks))
    for engine in (lives.cold, lives.warm):
        assert choices(served(engine, asks, reset_at=8, connector=True)) == expected
        for hit in (0, HIT):
            at_rest(engine)
            engine.reset_prefix_cache()
            replies = served(engine, asks)
            assert choices(replies) == expected
            assert [reply["cached"] for reply in replies] == [hit] * 2


def waiting_for_a_reset() -> dict[str, Any]:
    return {"prompt": next(PROMPTS), "sampling": {"max_tokens": 24}}
