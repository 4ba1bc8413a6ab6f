"""Several ranks, several engines: everybody's shards, and each object once."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from typing import Any

import pytest

from lab import models
from lab.engine import Ask
from lab.s3 import S3Server
from s3kv.objects.keys import parse
from tests.system.e2e.conftest import START_AND_STOP_S, Rig, answered, at_rest, cached, tokens
from tests.waiting import wait_until

PROMPTS = models.prompts(2, 800)
CHUNKS = 6
BOTH = {"h0-1of4-l0-3of4", "h2-3of4-l0-3of4"}
"""The shards of two tensor ranks."""

# vLLM's CPU worker makes the buffers a stage receives into in its warm-up, and skips that for an
# eager engine. This engine is as eager as one can be that warms up.
WARMED_UP = {"enforce_eager": False, "compilation_config": {"mode": 2, "backend": "eager"}}


def shards(s3: S3Server, bucket: str) -> dict[str, dict[str, str]]:
    """Chunk hash -> shard -> key, of all the bucket holds."""
    found: dict[str, dict[str, str]] = {}
    for key in s3.objects(bucket):
        address = parse(key)
        found.setdefault(address.key.block_hash.hex(), {})[address.shard] = key
    return found


def holds(s3: S3Server, bucket: str, chunks: int, parts: set[str]) -> bool:
    """Whether the bucket has every rank's part of so many chunks, and nothing else."""
    found = shards(s3, bucket)
    return len(found) == chunks and all(set(f) == parts for f in found.values())


@pytest.mark.long
@pytest.mark.timeout(3 * START_AND_STOP_S)
@pytest.mark.parametrize(
    ("engine_args", "ranks"),
    [
        pytest.param({"tensor_parallel_size": 2}, BOTH, id="tensor"),
        pytest.param(
            {"pipeline_parallel_size": 2, **WARMED_UP},
            {"h0-3of4-l0-1of4", "h0-3of4-l2-3of4"},
            id="pipeline",
        ),
    ],
)
def test_two_ranks(rig: Rig, engine_args: dict[str, Any], ranks: set[str]) -> None:
    """A new process hits what both ranks have, and nothing of what one of them has lost."""
    expected = rig.truth(PROMPTS)

    args = {"dtype": "float32", **engine_args}

    def everything(prompts: int) -> bool:
        return holds(rig.s3, rig.bucket, prompts * CHUNKS, ranks)

    with rig.launch(rig.tiny, rig.patient, **args) as cold:
        answers = cold.generate(PROMPTS[:1])
        wait_until("the first prompt is in the bucket", lambda: everything(1))
        of_the_first = shards(rig.s3, rig.bucket)
        answers += cold.generate(PROMPTS[1:])
        local = cold.generate(PROMPTS)
    assert cached(answers + local) == [0, 0, CHUNKS * 128, CHUNKS * 128]
    assert tokens(answers) == tokens(local) == expected
    assert everything(2)  # what was under way has been finished at the shutdown

    lost = max(ranks)
    for keys in of_the_first.values():
        rig.s3.client().delete_object(Bucket=rig.bucket, Key=keys[lost])
    with rig.launch(rig.tiny, rig.patient, **args) as warm:
        assert answered(warm.generate(PROMPTS)) == ([0, CHUNKS * 128], expected)
        wait_until("what was lost is there again", lambda: everything(2))
        check_counts(warm.metrics())

        # Out of memory, or an impatient supervisor: nothing may be left.
        assert len(warm.io_processes()) == 2
        warm.begin_generate([Ask(p, max_tokens=500) for p in models.prompts(2, 1_000, seed=7)])
        os.killpg(warm.processes()[0].pid, signal.SIGKILL)
        wait_until("all processes end", lambda: not warm.processes())


def check_counts(metrics: Mapping[str, float]) -> None:
    """Of one prompt both ranks have everything; of the other one rank lacks the first chunk."""
    count = {name.removeprefix("vllm:s3kv_"): value for name, value in metrics.items()}
    assert count["internal_errors_total"] == 0
    assert count["fetch_ok_total"] == count["fetch_seconds_count"] == 2 * CHUNKS + 1
    assert count["fetch_missing_total"] == 1
    assert count["misses_total{reason=absent}"] == 1, "a chunk is missed once, not on every rank"
    assert count["hit_tokens_bucket_total"] == CHUNKS * 128
    assert count["load_ok_total"] == count["load_seconds_count"] == 2
    # Each rank loads its half; in float32 a token takes twice what it takes in bf16.
    assert count["load_bytes_total"] == CHUNKS * 128 * models.TINY.kv_bytes_per_token * 2
    assert count["breaker{state=closed}"] == 1


@pytest.mark.long
@pytest.mark.timeout(3 * START_AND_STOP_S)
def test_new_weights_find_nothing_of_the_old_on_any_rank(rig: Rig) -> None:
    """The weights of a running engine change, and vLLM resets the connector: nothing of before is
    ever loaded again, in host memory or from the bucket, and what is computed from then on is."""
    new = models.build(rig.models_dir, models.TINY, seed=1)
    expected = tokens(rig.reference(new, PROMPTS, dtype="float32"))

    def saved(chunks: int) -> bool:
        return holds(rig.s3, rig.bucket, chunks, BOTH)

    with rig.launch(rig.tiny, rig.patient, dtype="float32", tensor_parallel_size=2) as engine:
        of_the_old = tokens(engine.generate(PROMPTS))
        wait_until("all is in the bucket", lambda: saved(2 * CHUNKS))
        before = set(shards(rig.s3, rig.bucket))

        engine.reload_weights(new)
        engine.reset_prefix_cache(connector=True)
        answers = engine.generate(PROMPTS)
        assert cached(answers) == [0, 0]
        assert tokens(answers) == expected != of_the_old
        wait_until("all is in the bucket again", lambda: saved(4 * CHUNKS))
        assert before < set(shards(rig.s3, rig.bucket))

        engine.reset_prefix_cache()
        assert answered(engine.generate(PROMPTS)) == ([CHUNKS * 128] * 2, expected)
        assert engine.metrics()["vllm:s3kv_internal_errors_total"] == 0


def test_two_engines_at_once(rig: Rig) -> None:
    expected = rig.truth(PROMPTS)
    everything = len(PROMPTS) * CHUNKS
    with (
        rig.serve(rig.tiny, rig.patient, dtype="float32") as one,
        rig.serve(rig.tiny, rig.patient, dtype="float32") as other,
    ):
        pending = [e.begin_generate(PROMPTS, concurrency=2) for e in (one, other)]
        for answers in pending:
            assert [a["tokens"] for a in answers.result()] == expected
        uploads = at_rest(one) + at_rest(other)
        assert uploads["upload_ok"] == len(rig.objects()) == everything
        assert uploads["upload_failed"] == 0
        for engine in (one, other):
            engine.reset_prefix_cache()
            assert answered(engine.generate(PROMPTS)) == ([CHUNKS * 128] * 2, expected)
    with rig.serve(rig.tiny, rig.patient, dtype="float32") as third:
        answers = third.generate(PROMPTS)
        assert at_rest(third)["hit_tokens_bucket"] == everything * 128
    assert answered(answers) == ([CHUNKS * 128] * 2, expected)
