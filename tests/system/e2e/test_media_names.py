"""Two images under one name, given by clients, in two engines that share a bucket.

The name has the form of vLLM's own hashes: nothing in the engine tells it from one. Whoever sends
the second image has to be answered about it, and not about the one the name stood for before.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lab.engine import Answer, Ask
from lab.s3 import S3Server
from tests.system.e2e.conftest import new_bucket, patient_for, tokens
from tests.system.e2e.pictures import Pictures, counters, ec_connector

NAME = "5e" * 32
TEXT = [20 + n % 400 for n in range(400)]
PREFIX_TOKENS = 384
PREFIX_CACHE = {"enable_prefix_caching": True, "dtype": "float32"}


def seen(image: int, *, named: bool = True) -> Ask:
    return Ask(TEXT, images=[image], uuids=[NAME] if named else [])


@pytest.fixture(scope="module")
def right(pictures: Pictures) -> dict[int, Answer]:
    """The answers about images 1 and 2 of an engine without a connector, with a hit of its own."""
    with pictures(None, **PREFIX_CACHE) as engine:
        asks = [seen(1, named=False), seen(2, named=False)]
        engine.generate(asks)
        one, two = engine.generate(asks)
    assert one.tokens != two.tokens, "images matter"
    return {1: one, 2: two}


@pytest.fixture(scope="module")
def planted(pictures: Pictures, s3: S3Server) -> Iterator[str]:
    """A bucket with the KV and the encoder's output of image 1, by its client called `NAME`."""
    with new_bucket(s3) as bucket:
        kv = patient_for(s3, bucket)
        with pictures(ec_connector(s3, bucket), connector=kv, **PREFIX_CACHE) as engine:
            engine.generate([seen(1)])
            assert counters(engine)["saves"] == 1
        assert len(s3.objects(bucket)) == 1 + PREFIX_TOKENS // 128
        yield bucket


def test_an_image_planted_under_anothers_name_reaches_nobody(
    pictures: Pictures, s3: S3Server, planted: str, right: dict[int, Answer]
) -> None:
    """Neither its KV nor, where that is a miss, the encoder's output."""
    kv = patient_for(s3, planted)
    with pictures(ec_connector(s3, planted), connector=kv, **PREFIX_CACHE) as engine:
        answers = engine.generate([seen(2)])
        answers += engine.generate([seen(2)])
        count = counters(engine)
    assert tokens(answers) == [right[2].tokens] * 2
    assert (count["hits"], count["encoded"]) == (0, 1)


def test_the_same_image_under_the_same_name_is_served(
    pictures: Pictures, s3: S3Server, planted: str, right: dict[int, Answer]
) -> None:
    kv = {"connector": patient_for(s3, planted)}
    with pictures(None, **kv, **PREFIX_CACHE) as engine:
        (answer,) = engine.generate([seen(1)])
        hits = engine.metrics()["vllm:s3kv_hit_tokens_bucket_total"]
    assert answer.tokens == right[1].tokens
    assert hits == PREFIX_TOKENS
    with pictures(ec_connector(s3, planted), **PREFIX_CACHE) as engine:
        (answer,) = engine.generate([seen(1)])
        count = counters(engine)
    assert answer.tokens == right[1].tokens
    assert (count["hits"], count["encoded"]) == (1, 0)


def test_one_name_for_two_images_in_one_engine_poisons_no_bucket(
    pictures: Pictures, s3: S3Server, bucket: str, right: dict[int, Answer]
) -> None:
    """There vLLM itself answers about the first image, whichever is sent, because its own caches go
    by names; what it has computed then must not be found as the second one's."""
    kv = patient_for(s3, bucket)
    args = PREFIX_CACHE | {"connector": kv, "mm_processor_cache_gb": 0}
    with pictures(ec_connector(s3, bucket), **args) as engine:
        first, misled = engine.generate([seen(1), seen(2)])
    assert first.tokens == misled.tokens, "vLLM has changed: the second image is looked at"
    with pictures(ec_connector(s3, bucket), **args) as engine:
        (answer,) = engine.generate([seen(2)])
    assert answer.tokens == right[2].tokens
