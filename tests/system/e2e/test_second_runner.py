"""vLLM's second-generation model runner, which engines on GPUs have, interpreted on the CPU.

What `lab.second_runner` says of it holds: its Python is the GPU's, its kernels are interpreted, its
streams and events are stand-ins of vLLM's. So these tests show the order of the hooks and what the
scheduler and the runner tell us; they show nothing about concurrency on a GPU. A step takes three
to five times as long as on the first runner: the tests take few steps, and share engines.

Answers are those of an engine on the first runner without a connector. Float32, in which tokens
depend neither on the length of a hit nor on how requests share a step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lab import models
from lab.engine import Answer, Ask, Engine
from lab.s3 import S3Server
from tests.system.e2e.conftest import (
    SECOND,
    START_AND_STOP_S,
    Aborts,
    Rig,
    Serve,
    Truth,
    answered,
    at_rest,
    cached,
    changed,
    new_bucket,
    patient_for,
    tokens,
)
from tests.system.e2e.pictures import ITEM_BYTES, Pictures, ask, counters, ec_connector
from tests.system.e2e.test_features import preemptions
from tests.system.e2e.test_parallel import BOTH, holds
from tests.waiting import wait_until

ARGS: dict[str, Any] = {**SECOND, "dtype": "float32"}
AS_ON_GPU = "lab.second_runner.as_on_gpu"
PROMPTS = models.prompts(6, 600, seed=20)
CHUNKS = 4
HIT = CHUNKS * 128
CROWD = models.prompts(6, 370, seed=21)
NEW = models.prompts(3, 900, seed=22)
BLOCKS = 14
"""Of the engines' KV caches: with five requests of the crowd they are full, with six too small."""
SMALL = {"num_gpu_blocks_override": BLOCKS, "max_model_len": 1_600, "max_num_batched_tokens": 256}
CROWD_TOKENS = 24
PRIVATE = {"s3kv": {"save": False}}


@dataclass(frozen=True)
class FirstLife:
    """What an engine with an empty bucket has answered and done; it is gone.

    crowd: the answers to `CROWD`. cold: to `PROMPTS`. host: to `PROMPTS` again, after the engine
    has forgotten its own KV. done: what that took. preempted: how often requests of the crowd were.
    """

    runner: str
    bucket: str
    crowd: list[Answer]
    preempted: float
    cold: list[Answer]
    host: list[Answer]
    done: Counter[str]


@pytest.fixture(scope="module")
def first_life(s3: S3Server, tiny: Path, serve: Serve) -> Iterator[FirstLife]:
    with new_bucket(s3) as bucket:
        connector = changed(patient_for(s3, bucket), miss_ttl_s=3_600.0)
        with serve(tiny, connector, **SMALL, **ARGS) as engine:
            # Then it is known that the bucket has nothing of the crowd: all of it begins at once,
            # and overlaps however slow the bucket is.
            engine.generate([Ask(prompt, 1, kv_transfer_params=PRIVATE) for prompt in CROWD])
            engine.reset_prefix_cache()
            crowd = engine.generate(CROWD, max_tokens=CROWD_TOKENS, concurrency=len(CROWD))
            preempted = preemptions(engine)
            cold = engine.generate(PROMPTS, concurrency=2)
            before = at_rest(engine)
            engine.reset_prefix_cache()
            host = engine.generate(PROMPTS)
            done = at_rest(engine) - before
            runner = engine.call("tests.system.e2e.inside:runner")
        yield FirstLife(runner, bucket, crowd, preempted, cold, host, done)


@pytest.fixture(scope="module")
def second_life(s3: S3Server, tiny: Path, serve: Serve, first_life: FirstLife) -> Iterator[Engine]:
    """An engine that finds all of this in the bucket, and schedules ahead."""
    with serve(
        tiny,
        patient_for(s3, first_life.bucket),
        prepare=f"{AS_ON_GPU}:schedule_asynchronously",
        **SMALL,
        **ARGS,
    ) as engine:
        assert engine.call("tests.system.e2e.inside:schedules_ahead")
        yield engine


@pytest.mark.long
def test_cold_in_several_steps_then_from_host_memory(first_life: FirstLife, truth: Truth) -> None:
    assert first_life.runner.startswith("vllm.v1.worker.cpu.")
    assert tokens(first_life.cold) == tokens(first_life.host) == truth(PROMPTS)
    assert cached(first_life.cold) == [0] * len(PROMPTS)
    assert cached(first_life.host) == [HIT] * len(PROMPTS)
    assert first_life.done["hit_tokens_host"] == len(PROMPTS) * HIT
    assert first_life.done["saves"] == 0


@pytest.mark.long
def test_preempted(first_life: FirstLife, truth: Truth) -> None:
    assert first_life.preempted > 0
    assert tokens(first_life.crowd) == truth(CROWD, CROWD_TOKENS)


def test_a_new_process_scheduling_ahead_hits_the_bucket_and_its_own_cache(
    second_life: Engine, truth: Truth
) -> None:
    asked = PROMPTS[:2]
    before = at_rest(second_life)
    warm = second_life.generate(asked, concurrency=2)
    again = second_life.generate(asked)
    done = at_rest(second_life) - before
    assert answered(warm) == answered(again) == ([HIT, HIT], truth(asked))
    assert (done["hit_tokens_bucket"], done["fetch_ok"], done["load_ok"]) == (2 * HIT, 8, 2)
    assert done["saves"] == 0


@pytest.mark.long
def test_preempted_while_scheduling_ahead(second_life: Engine, truth: Truth) -> None:
    # From host memory all begin at once, and overlap however slow the bucket is.
    second_life.generate(CROWD, max_tokens=1)
    second_life.reset_prefix_cache()
    before = preemptions(second_life)
    answers = second_life.generate(CROWD, max_tokens=CROWD_TOKENS, concurrency=len(CROWD))
    assert tokens(answers) == truth(CROWD, CROWD_TOKENS)
    assert preemptions(second_life) > before
    at_rest(second_life)


@pytest.mark.long
def test_aborted_at_any_moment_while_scheduling_ahead(second_life: Engine, truth: Truth) -> None:
    """Whenever a request is given up, it leaves nothing behind, and the next one with the same
    prompt is answered as if it had not been there."""
    Aborts(second_life, truth).at_any_moment(PROMPTS[2:5], NEW[1:], NEW[0] + NEW[1][:350], BLOCKS)


def test_blocks_are_read_before_the_next_step_zeroes_them(rig: Rig) -> None:
    """The runner zeroes a request's new blocks before it tells us which fences to set. With the
    guard against that, saves that are as late as can be still save what was there; without it they
    save zeros, and tokens are wrong."""
    prompts = models.prompts(6, 1_200, seed=23)
    sizes = {"num_gpu_blocks_override": BLOCKS, "max_model_len": 1_600}
    with rig.serve(
        rig.tiny,
        patient_for(rig.s3, rig.bucket),
        prepare=f"{AS_ON_GPU}:zero_new_blocks",
        max_num_seqs=1,
        **sizes,
        **ARGS,
    ) as engine:

        def saved_late(prompts: list[list[int]], *, guarded: bool) -> list[Answer]:
            engine.call(
                "tests.system.e2e.inside:serve_and_save_late", prompts=prompts, guarded=guarded
            )
            at_rest(engine)
            engine.reset_prefix_cache()
            return engine.generate(prompts)

        right = saved_late(prompts[:3], guarded=True)
        wrong = saved_late(prompts[3:], guarded=False)
    assert cached(right) == cached(wrong) == [1_200 // 128 * 128] * 3
    assert tokens(right) == rig.truth(prompts[:3])
    # Any of them shows what the guard is for.
    assert tokens(wrong) != rig.truth(prompts[3:])


@pytest.mark.long
@pytest.mark.timeout(2 * START_AND_STOP_S)
def test_two_ranks(rig: Rig) -> None:
    """Each rank in a process of its own, interpreting its own kernels."""
    asked = PROMPTS[:2]
    args = {"tensor_parallel_size": 2, "start_timeout_s": START_AND_STOP_S, **ARGS}

    def saved() -> bool:
        return holds(rig.s3, rig.bucket, 2 * CHUNKS, BOTH)

    with rig.launch(rig.tiny, rig.patient, **args) as engine:
        cold = engine.generate(asked, max_tokens=4)
        wait_until("all is in the bucket", saved, START_AND_STOP_S)
        engine.reset_prefix_cache()
        warm = engine.generate(asked, max_tokens=4)
        metrics = engine.metrics()
    assert cached(cold) == [0, 0]
    assert cached(warm) == [HIT, HIT]
    assert tokens(cold) == tokens(warm) == rig.truth(asked, 4)
    assert metrics["vllm:s3kv_hit_tokens_host_total"] == 2 * HIT
    assert metrics["vllm:s3kv_internal_errors_total"] == 0


IMAGES = [1, 2, 3, 4]


@pytest.fixture(scope="module")
def encoded(pictures: Pictures, s3: S3Server) -> Iterator[str]:
    """A bucket with the outputs of `IMAGES`, from a process that only encodes and has ended."""
    with new_bucket(s3) as bucket:
        only_encode = f"{AS_ON_GPU}:only_encode"
        producer = ec_connector(s3, bucket, "ec_producer")
        with pictures(producer, second_runner=True, prepare=only_encode) as engine:
            runner = engine.call("tests.system.e2e.inside:runner")
            assert runner == "vllm.v1.worker.mm_encoder_model_runner"
            answers = engine.generate([ask(image, max_tokens=1) for image in IMAGES], concurrency=4)
            assert all(answer.finish_reason != "error" for answer in answers)
        yield bucket


@pytest.mark.long
def test_encoder_outputs_beside_kv(pictures: Pictures, s3: S3Server, encoded: str) -> None:
    """What a process that only encodes has saved is not encoded again by one that serves, with both
    connectors; and what that one encodes itself it saves."""
    with pictures(None) as engine:
        right = engine.generate([ask(image) for image in [*IMAGES, 5]])
    assert list(s3.objects(encoded).values()) == [ITEM_BYTES] * len(IMAGES)
    args = {"enable_prefix_caching": True, "connector": patient_for(s3, encoded)}
    with pictures(ec_connector(s3, encoded), second_runner=True, **args) as engine:
        answers = engine.generate([ask(image) for image in IMAGES], concurrency=4)
        count = counters(engine)
        answers += engine.generate([ask(5)])
        more = counters(engine) - count
        long = Ask([20 + n % 400 for n in range(400)], images=[1])
        first = engine.generate([long])
        engine.call("lab.audit:audit")
        engine.reset_prefix_cache()
        second = engine.generate([long])
        metrics = engine.metrics()
    assert tokens(answers) == tokens(right)
    assert (count["hits"], count["fetch_ok"], count["encoded"]) == (4, 4, 0)
    assert count["hit_rows"] == count["hit_rows_bucket"]
    assert (more["hits"], more["encoded"]) == (0, 1)
    assert (first[0].cached_tokens, second[0].cached_tokens) == (0, 384)
    assert metrics["vllm:s3kv_hit_tokens_host_total"] == 384
    items = [size for size in s3.objects(encoded).values() if size == ITEM_BYTES]
    assert len(items) == len(IMAGES) + 1, "what was encoded last was uploaded at the shutdown"
