"""Requests as they come in life: many at once, turn after turn, preempted, aborted at any moment.

Float32 throughout: how requests share a step, and how much of a prompt is hit, must not matter
for the tokens, and in bf16 it does (see `References`).
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lab import models
from lab.engine import Ask
from lab.s3 import S3Server
from s3kv.planning.requests import PROBE_CHUNKS
from tests.system.e2e.conftest import (
    FLOAT32,
    SECOND,
    Aborts,
    Rig,
    Serve,
    answered,
    at_rest,
    cached,
    changed,
    new_bucket,
    patient_for,
    tokens,
)

CHUNK_BYTES = 128 * 4_096 + 4_096
"""In float32 the tiny model has 4 KiB of KV per token; and a page for the header."""
LONG = models.prompts(6, 1_200, seed=10)
CHUNKS = 9
HIT = CHUNKS * 128
TAILS = models.prompts(40, 900, seed=11)
FIRST_TURN = models.prompts(1, 300, seed=12)[0]


@dataclass(frozen=True)
class Library:
    """A bucket with what an engine, gone by now, has saved of `LONG` and of a conversation. answer:
    to `FIRST_TURN`."""

    bucket: str
    answer: list[int]


@pytest.fixture(scope="module")
def library(s3: S3Server, tiny: Path, serve: Serve) -> Iterator[Library]:
    with new_bucket(s3) as bucket:
        with serve(tiny, patient_for(s3, bucket), **FLOAT32) as engine:
            engine.generate(LONG, max_tokens=1)
            (answer,) = engine.generate([FIRST_TURN], max_tokens=500)
            saved = at_rest(engine)["upload_ok"]
        assert saved == len(LONG) * CHUNKS + 799 // 128
        yield Library(bucket, answer.tokens)


@pytest.fixture
def connector(s3: S3Server, library: Library) -> Iterator[dict[str, Any]]:
    """For a bucket that holds what the library holds, probed as by default."""
    with new_bucket(s3, like=library.bucket) as bucket:
        yield changed(patient_for(s3, bucket), probe_chunks=PROBE_CHUNKS)


def test_a_crowd_fetches_each_chunk_once_and_a_second_turn_hits_the_first(
    rig: Rig, connector: dict[str, Any], library: Library
) -> None:
    crowd = [LONG[0][: 6 * 128] + tail[:60] for tail in TAILS[:32]]
    second_turn = FIRST_TURN + library.answer + TAILS[0][:100]
    with rig.serve(rig.tiny, connector, max_num_seqs=32, **FLOAT32) as engine:
        answers = engine.generate(crowd, concurrency=32)
        assert tokens(answers) == rig.truth(crowd)
        # Nobody computed a prefix; who came after the first may have found it in the engine.
        assert cached(answers) == [6 * 128] * 32
        crowded = at_rest(engine)
        # The first probes go beyond what the crowd shares.
        assert crowded["fetch_ok"] == 6
        assert crowded["hit_tokens_bucket"] >= 6 * 128

        answers = engine.generate([second_turn])
        assert tokens(answers) == rig.truth([second_turn])
        # All of the first turn but its last token, whose KV nobody needed to compute.
        assert cached(answers) == [799 // 128 * 128]
        assert (at_rest(engine) - crowded)["hit_tokens_bucket"] == 799 // 128 * 128


def test_preempted_requests_with_little_memory(rig: Rig, connector: dict[str, Any]) -> None:
    """Six requests start together in a KV cache that holds half of what they end with, and a slab
    with half of their chunks; cold and warm."""
    little = changed(connector, host_bytes=16 * CHUNK_BYTES)
    sizes = {"num_gpu_blocks_override": 20, "max_model_len": 2_048, **FLOAT32}
    asks = [tail[:300] for tail in TAILS[:6]]
    expected = rig.truth(asks, max_tokens=400)
    for life in ("cold", "warm"):
        with rig.serve(rig.tiny, little, **sizes) as engine:
            answers = engine.generate(asks, max_tokens=400, concurrency=6)
            assert tokens(answers) == expected
            assert engine.metrics()["vllm:num_preemptions_total"] > 0
            assert at_rest(engine)["evictions"] > 0
            if life == "warm":
                assert cached(answers) == [256] * 6


def test_aborted_at_any_moment(rig: Rig, connector: dict[str, Any]) -> None:
    """Whenever a request is given up, it leaves nothing behind, and the next one with the same
    prompt is answered as if it had not been there."""
    hog = TAILS[10] + TAILS[11][:800]
    fresh = [LONG[i][:600] + TAILS[i] for i in (5, 4)]
    sizes = {"num_gpu_blocks_override": 24, "max_model_len": 2_900, "max_num_batched_tokens": 256}
    with rig.serve(rig.tiny, connector, **sizes, **FLOAT32) as engine:
        aborts = Aborts(engine, rig.truth)
        aborts.at("queued", LONG[0])
        assert aborts.still_right(LONG[0]) == HIT
        aborts.at_any_moment([LONG[1], *LONG[3:5]], fresh, hog, 24)

        # The next one joins the fetches that are being cancelled.
        (io_process,) = engine.io_processes()
        io_process.send_signal(signal.SIGSTOP)
        aborts.at("waiting", LONG[2])
        pending = engine.begin_generate([LONG[2]])
        io_process.send_signal(signal.SIGCONT)
        (answer,) = pending.result()
        assert [answer["tokens"]] == rig.truth([LONG[2]])
        assert answer["cached_tokens"] == HIT


def test_a_private_request_leaves_nothing_behind(rig: Rig) -> None:
    """Neither in host memory nor in the bucket, not even after a preemption. A public request with
    the same tokens saves them itself, also those that the engine's own cache still has."""
    # No request waits for a probe, so all six are there together.
    private = {"s3kv": {"save": False, "load": False}}
    prompts = [tail[:300] for tail in TAILS[:6]]
    asks = [Ask(prompt, max_tokens=400, kv_transfer_params=private) for prompt in prompts]
    sizes = {"num_gpu_blocks_override": 20, "max_model_len": 2_048, **FLOAT32}
    with rig.serve(rig.tiny, rig.patient, **sizes) as engine:
        assert tokens(engine.generate(asks, concurrency=6)) == rig.truth(prompts, max_tokens=400)
        assert engine.metrics()["vllm:num_preemptions_total"] > 0
        alone = at_rest(engine)
        assert (alone["saves"], alone["fetches"]) == (0, 0)
        assert rig.objects() == {}

        engine.reset_prefix_cache()
        assert cached(engine.generate(prompts[:1])) == [0]
        assert cached(engine.generate([Ask(prompts[1], kv_transfer_params=private)])) == [0]
        assert cached(engine.generate([prompts[1]])) == [256]
        done = at_rest(engine)
        assert done["upload_ok"] == done["saves"] == len(rig.objects()) == 4
        assert done["hit_tokens_host"] + done["hit_tokens_bucket"] == 0


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_roles(rig: Rig, connector: dict[str, Any], role: str) -> None:
    """A producer saves and never loads, a consumer loads and never saves."""
    asked = [LONG[0], TAILS[0]]
    with rig.serve(rig.tiny, connector | {"kv_role": role}, **FLOAT32, **SECOND) as engine:
        first = engine.generate(asked)
        assert engine.call("lab.audit:reset", connector=False)
        second = engine.generate(asked)
        done = at_rest(engine)
    assert tokens(first) == tokens(second) == rig.truth(asked)
    if role == "kv_producer":
        assert cached(first) == cached(second) == [0, 0]
        assert done["fetches"] == 0
        assert done["saves"] == CHUNKS + 900 // 128
        assert done["upload_ok"] == 900 // 128
    else:
        assert cached(first) == cached(second) == [HIT, 0]
        assert done["saves"] == 0
        assert (done["hit_tokens_bucket"], done["hit_tokens_host"]) == (HIT, HIT)


def test_salts_and_an_engine_without_a_cache_of_its_own(
    rig: Rig, connector: dict[str, Any]
) -> None:
    prompt = LONG[0]
    asked = [
        Ask(prompt),
        Ask(prompt),
        Ask(prompt, cache_salt="a"),
        Ask(prompt, cache_salt="a"),
        Ask(prompt, cache_salt="b"),
        Ask(prompt),
    ]
    one_probe = changed(connector, probe_chunks=1)
    with rig.serve(rig.tiny, one_probe, enable_prefix_caching=False, **FLOAT32, **SECOND) as engine:
        answers = [answer for ask in asked for answer in engine.generate([ask])]
        done = at_rest(engine)
    assert answered(answers) == ([HIT, HIT, 0, HIT, 0, HIT], rig.truth([prompt]) * 6)
    assert done["hit_tokens_bucket"] == HIT
    assert done["hit_tokens_host"] == 3 * HIT
