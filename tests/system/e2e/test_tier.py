"""s3kv as a secondary tier of vLLM's OffloadingConnector, on the real engine.

`lab/offloading_on_cpu.py` stands in for the streams, events and copy kernel of a GPU; scheduler,
primary tier and tier run as they are. In float32 unless a family computes in bf16 alone: then the
length of a hit does not change the tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lab import latent, models
from lab.engine import Answer, Ask, Engine
from lab.offloading import offloading
from lab.s3 import S3Server
from tests.system.e2e.conftest import (
    FLOAT32,
    SECOND,
    START_AND_STOP_S,
    Rig,
    answered,
    at_rest,
    cached,
    check_tiers,
    family_params,
    in_every_tier,
    patient_for,
    tokens,
)
from tests.system.e2e.servers import Store
from tests.system.e2e.test_failures import CHUNK_BYTES
from tests.system.e2e.test_families import GRANITE4, QWEN3_NEXT, model_of
from tests.system.forms import blank, flipped
from tests.waiting import wait_until

PROMPTS = models.prompts(2, 800, seed=80)
CHUNKS = 6
HIT = CHUNKS * 128
VLLMS = {"host_bytes", "chunk_tokens"}
"""Settings of the connector that are vLLM's here."""


def tier(s3: S3Server, bucket: str, *, fails: bool = False, **settings: Any) -> dict[str, Any]:
    """An entry of `secondary_tiers`, patient as `patient_for`."""
    patient = patient_for(s3, bucket, fails=fails)["kv_connector_extra_config"]
    kept = {name: value for name, value in patient.items() if name not in VLLMS}
    return {"type": "s3kv"} | kept | settings


def with_few_rows(s3: S3Server, bucket: str) -> dict[str, Any]:
    """Ten rows hold two prompts of `MANY`, so with six in turn every hit comes from the bucket."""
    return offloading(tier(s3, bucket, fails=True), 10 * CHUNK_BYTES)


class Case(NamedTuple):
    """prompt: its length. hit: tokens of it that a repetition need not compute. cold: whether an
    answer without a hit has the same tokens. runner: arguments of the engines with the tier. build:
    makes the model of that name in a folder. answer: its length."""

    name: str
    prompt: int = 769
    hit: int = 768
    args: dict[str, Any] = FLOAT32
    cold: bool = True
    runner: dict[str, Any] = {}  # noqa: RUF012
    build: Callable[[Path, str], Path] = model_of
    answer: int = 40


CASES = (
    Case("tiny", runner=SECOND, answer=8),
    Case("gemma3"),
    Case("qwen3_next", 2_305, 2_304, QWEN3_NEXT.args, cold=False),
    Case("granite4", args=GRANITE4.args, cold=False),
    Case(
        "deepseek_v3",
        args=FLOAT32 | {"attention_backend": "CPU_MLA", "prepare": "lab.on_cpu:keep_prefix_cache"},
        cold=False,  # experts are chosen by rounding
        build=lambda directory, _: latent.build(directory),
    ),
)


@pytest.mark.timeout(4 * START_AND_STOP_S)
@pytest.mark.parametrize("case", family_params(CASES, default={"tiny", "gemma3"}))
def test_a_new_process_gives_the_tokens_of_a_local_hit(rig: Rig, case: Case) -> None:
    """Cold, from the primary tier, and in a new process from the bucket. Then with every object
    zeroed, whose tokens differ: what is stored matters."""
    model = rig.tiny if case.name == "tiny" else case.build(rig.models_dir, case.name)
    prompts = models.prompts(2, case.prompt, seed=81)
    asks = [Ask(prompt, case.answer) for prompt in prompts]
    args = case.args | {"enable_prefix_caching": True}
    expected = tokens(rig.reference(model, prompts, max_tokens=case.answer, **args))
    connector = offloading(tier(rig.s3, rig.bucket, integrity="none"), 2**28)
    args |= case.runner
    found = in_every_tier(rig.serve, model, connector, asks, **args)
    check_tiers(found, expected, case.hit, cold=case.cold)
    assert rig.s3.change(rig.bucket, blank) > 0
    with rig.serve(model, connector, **args) as engine:
        wrong = engine.generate(asks)
    assert cached(wrong) == [case.hit] * 2
    assert all(a != b for a, b in zip(tokens(wrong), expected, strict=True))


@pytest.mark.timeout(3 * START_AND_STOP_S)
def test_another_question_hits_the_system_prompt_until_it_is_damaged(rig: Rig) -> None:
    """A corrupted object is a miss, and no request waits for it again and again."""
    (system_prompt,) = models.prompts(1, 2_000, seed=82)
    first, second = (system_prompt + question for question in models.prompts(2, 100, seed=83))
    expected = tokens(rig.reference(rig.tiny, [first, second], **FLOAT32))
    connector = offloading(tier(rig.s3, rig.bucket), 2**28)

    def served(prompt: list[int]) -> list[Answer]:
        with rig.serve(rig.tiny, connector, **FLOAT32, **SECOND) as engine:
            answers = engine.generate([prompt])
            at_rest(engine)
            return answers

    assert tokens(served(first)) == expected[:1]
    assert answered(served(second)) == ([1_920], expected[1:])
    assert rig.s3.change(rig.bucket, flipped) >= 1_920 // 128
    assert answered(served(first)) == ([0], expected[:1])


@pytest.mark.nightly
@pytest.mark.timeout(3 * START_AND_STOP_S)
@pytest.mark.parametrize(("writes", "reads"), [(1, 2), (2, 1)])
def test_a_canonical_layout_serves_any_number_of_ranks(rig: Rig, writes: int, reads: int) -> None:
    expected = tokens(rig.reference(rig.tiny, PROMPTS, **FLOAT32))
    connector = offloading(tier(rig.s3, rig.bucket), 2**28, canonical_layout=True)

    def engine(ranks: int) -> Engine:
        return rig.launch(rig.tiny, connector, tensor_parallel_size=ranks, **FLOAT32)

    with engine(writes) as cold:
        assert tokens(cold.generate(PROMPTS)) == expected
        wait_until("all is in the bucket", lambda: len(rig.s3.objects(rig.bucket)) == 2 * CHUNKS)
    with engine(reads) as warm:
        assert answered(warm.generate(PROMPTS)) == ([HIT] * 2, expected)


MANY = models.prompts(6, 4 * 128 + 40, seed=84)


def test_a_bucket_that_goes_and_an_io_process_that_is_killed(rig: Rig, store: Store) -> None:
    """The bucket is away when chunks are looked up and stored, there again, and away at the
    shutdown. The I/O process dies amid loads and stores; another one serves afterwards."""
    expected = tokens(rig.reference(rig.tiny, MANY, **FLOAT32))
    store.start()
    connector = with_few_rows(S3Server(store.url, rig.s3.env), Store.BUCKET)
    with rig.serve(rig.tiny, connector, **FLOAT32) as engine:

        def ask(meanwhile: Callable[[], object] = lambda: None) -> int:
            """Returns the tokens that were hit."""
            engine.reset_prefix_cache()
            pending = engine.begin_generate(MANY, concurrency=3)
            meanwhile()
            answers = [Answer(**answer) for answer in pending.result()]
            assert [answer.finish_reason for answer in answers] == ["length"] * len(MANY)
            assert tokens(answers) == expected
            return sum(hit or 0 for hit in cached(answers))

        def kill_io() -> None:
            for process in engine.io_processes():
                process.kill()

        ask()
        at_rest(engine)
        store.remember()
        store.kill()
        ask()
        ask()
        store.start()
        wait_until("the bucket is used again", lambda: ask() > 0)
        ask(kill_io)
        ask(kill_io)
        wait_until("another I/O process serves", lambda: ask() > 0)
        assert engine.io_processes()
        at_rest(engine)
        ask(store.kill)
