"""Many items at once on the real engine: in one request, in many, and more than fit anywhere.

In float32, where a token does not depend on which items share a step. The engine's own encoder
cache holds two items, so that an album of six is loaded or encoded in several steps, and nothing
stays there from one prompt to the next.
"""

from __future__ import annotations

from typing import Any

from lab import vision
from lab.engine import Answer
from lab.s3 import S3Server
from tests.system.e2e.conftest import Rig, patient_for, tokens
from tests.system.e2e.pictures import Pictures, ask, counters, ec_connector

ALBUM = {
    "prepare": "lab.vision:allow_albums",
    "limit_mm_per_prompt": {"image": 12},
    "max_num_batched_tokens": 2 * vision.QUERY_TOKENS,
    "dtype": "float32",
}
PROMPTS = {
    "one": ask(1),
    "an album": ask(2, 3, 4, 5, 6, 11),
    "the same twice": ask(7, 7),
    "the same twice, far apart": ask(8, 9, 10, 8),
    "a clip": ask(*range(20, 32)),
}
DIFFERENT = len({image for prompt in PROMPTS.values() for image in prompt.images})


def test_albums_are_encoded_once_and_loaded_in_any_order(rig: Rig, pictures: Pictures) -> None:
    ec = ec_connector(rig.s3, rig.bucket)
    with pictures(ec, **ALBUM) as engine:
        cold = engine.generate(list(PROMPTS.values()))
        count = counters(engine)
    assert [answer.finish_reason for answer in cold] == ["length"] * len(PROMPTS)
    assert count["hits"] == 0
    assert count["encoded"] > DIFFERENT, "the engine's own cache kept nothing that was needed again"
    assert len(rig.objects()) == DIFFERENT

    with pictures(ec, **ALBUM) as engine:
        alone = engine.generate(list(PROMPTS.values()))
        first = counters(engine)
        crowd = [prompt for prompt in PROMPTS.values() for _ in range(3)]
        together = engine.generate(crowd, concurrency=len(crowd))
        count = counters(engine)
    assert tokens(alone) == tokens(cold)
    assert tokens(together) == [answer.tokens for answer in cold for _ in range(3)]
    assert first["fetches"] == first["fetch_ok"] == DIFFERENT
    assert first["hits"] > DIFFERENT, "what the engine dropped came from host memory again"
    assert (count["encoded"], count["fetches"]) == (0, DIFFERENT)
    assert count["saves"] == count["deadline_cuts"] == 0


def test_one_prompt_takes_keys_and_values_and_items_from_the_bucket(
    pictures: Pictures, s3: S3Server, bucket: str
) -> None:
    """After a restart: the prefix that the KV cache has covers twelve images of fourteen, which are
    not asked for; the other two are loaded. Both connectors count their hits."""
    images = list(range(40, 54))
    covered, tokens_covered = 12, 12 * vision.QUERY_TOKENS
    args = {
        "prepare": "lab.vision:allow_albums",
        "limit_mm_per_prompt": {"image": len(images)},
        "dtype": "float32",
        "enable_prefix_caching": True,
        "connector": patient_for(s3, bucket),
    }
    ec = ec_connector(s3, bucket)
    with pictures(ec, **args) as engine:
        cold = engine.generate([ask(*images)])
        assert counters(engine)["encoded"] == len(images)
        engine.call("lab.audit:audit")
    with pictures(ec, **args) as engine:
        warm = engine.generate([ask(*images)])
        metrics, count = engine.metrics(), counters(engine)
        engine.call("lab.audit:audit")
    assert tokens(warm) == tokens(cold)
    assert warm[0].cached_tokens == tokens_covered
    assert metrics["vllm:s3kv_hit_tokens_bucket_total"] == tokens_covered
    left = len(images) - covered
    assert (count["fetches"], count["hits"], count["encoded"]) == (left, left, 0)
    assert count["hit_rows"] == left * vision.QUERY_TOKENS


def test_an_item_larger_than_all_the_memory_there_is(rig: Rig) -> None:
    """It is encoded every time, and neither asked for nor saved."""
    model = vision.build(rig.models_dir, query_tokens=600, hidden=1024)
    sizes: dict[str, Any] = {"host_bytes": "1MiB"}
    with Pictures(rig.s3, model, rig.tmp_path)(ec_connector(rig.s3, rig.bucket, **sizes)) as engine:
        answers: list[Answer] = engine.generate([ask(1), ask(2)])
        count = counters(engine)
    assert [answer.finish_reason for answer in answers] == ["length"] * 2
    assert (count["items_too_large"], count["encoded"], count["saves_dropped"]) == (2, 2, 2)
    assert count["fetches"] == 0
    assert rig.objects() == {}
