"""The EC connector on the real engine: images encoded once, and served from the bucket after."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from lab import vision
from lab.engine import Answer, Ask, Engine
from lab.faults import Fault, s3_error
from lab.proxy import Proxy, proxy
from lab.s3 import S3Server
from s3kv.objects.item_format import ItemFormat
from s3kv.objects.keys import parse
from s3kv.place import Place
from s3kv.types import ItemShape
from tests.system.e2e.conftest import new_bucket, patient_for, tokens
from tests.system.e2e.pictures import ITEM_BYTES, Pictures, ask, counters, ec_connector
from tests.system.forms import flipped
from tests.waiting import wait_until

IMAGES = list(range(1, 13))


def requests(engine: Engine, verb: str) -> float:
    """Requests that the store has answered with success, as the metrics tell."""
    return engine.metrics()[f"vllm:s3kv_ec_io_requests_total{{status=2xx,verb={verb}}}"]


@pytest.fixture(scope="module")
def right(pictures: Pictures) -> list[Answer]:
    """The answers of an engine without a connector."""
    with pictures(None) as engine:
        answers = engine.generate([ask(image) for image in IMAGES])
    assert len({tuple(answer.tokens) for answer in answers}) > len(IMAGES) // 2, "images matter"
    return answers


@pytest.fixture(scope="module")
def filled(pictures: Pictures, s3: S3Server) -> Iterator[str]:
    """A bucket with the outputs of `IMAGES`, from a process that only encodes and has ended."""
    with new_bucket(s3) as bucket:
        with pictures(ec_connector(s3, bucket, "ec_producer")) as engine:
            answers = engine.generate([ask(image, max_tokens=1) for image in IMAGES], concurrency=4)
            assert all(answer.finish_reason != "error" for answer in answers)
        # Also what was encoded last, after which the engine made no step any more.
        assert list(s3.objects(bucket).values()) == [ITEM_BYTES] * len(IMAGES)
        yield bucket


@pytest.mark.core
def test_a_new_process_encodes_nothing(
    pictures: Pictures, s3: S3Server, filled: str, right: list[Answer]
) -> None:
    """Whatever a client calls the image."""
    with pictures(ec_connector(s3, filled)) as engine:
        answers = engine.generate([ask(image) for image in IMAGES], concurrency=4)
        again = engine.generate([ask(image) for image in IMAGES])
        count = counters(engine)
        named = engine.generate([ask(1, uuids=["logo"])])
        more = counters(engine)
        wait_until(
            "the I/O process tells of its requests",
            lambda: engine.generate([ask(1)]) and requests(engine, "GET") >= len(IMAGES),
        )
        metrics = engine.metrics()
    assert tokens(answers) == tokens(right) == tokens(again)
    assert count["encoded"] == 0
    assert (count["hits"], count["fetch_ok"]) == (len(IMAGES), len(IMAGES))
    assert count["hit_rows"] == count["hit_rows_bucket"] == len(IMAGES) * vision.QUERY_TOKENS
    assert count["load_ok"] == len(IMAGES)
    assert metrics["vllm:s3kv_ec_load_seconds_count"] == len(IMAGES) + 1
    assert metrics["vllm:s3kv_ec_fetch_seconds_count"] == len(IMAGES)
    assert metrics["vllm:s3kv_ec_breaker{state=closed}"] == 1
    assert metrics["vllm:s3kv_ec_slab_bytes{state=clean}"] > 0
    assert count["upload_ok"] + count["upload_exists"] == 0
    assert tokens(named) == tokens(right[:1])
    assert (more["items_untrusted"], more["encoded"], more["saves"]) == (0, 0, 0)
    assert more["hits"] == len(IMAGES) + 1
    assert len(s3.objects(filled)) == len(IMAGES)


def zeroed(s3: S3Server, bucket: str) -> None:
    """Every object rightly sealed, with nothing in it."""
    client = s3.client()
    for key in s3.objects(bucket):
        address = parse(key)
        data = memoryview(bytearray(ITEM_BYTES))
        shape = ItemShape(vision.QUERY_TOKENS, ITEM_BYTES)
        layout = ItemFormat(address.namespace.digest, "BF16", shape)
        layout.seal(Place.of(data, layout.header_bytes), address.key.block_hash)
        client.put_object(Bucket=bucket, Key=key, Body=bytes(data))


def test_what_is_in_the_bucket_decides_about_the_tokens(
    pictures: Pictures, s3: S3Server, filled: str, right: list[Answer]
) -> None:
    """The control: with zeroed items, which verify, the tokens are others; what does not verify is
    encoded anew, and right."""
    with new_bucket(s3, like=filled) as bucket:
        zeroed(s3, bucket)
        with pictures(ec_connector(s3, bucket, "ec_consumer", miss_ttl_s=0.0)) as engine:
            answers = engine.generate([ask(image) for image in IMAGES[:4]])
            assert counters(engine)["hits"] == 4
            wrong = [a.tokens != b.tokens for a, b in zip(answers, right[:4], strict=True)]
            assert all(wrong)
            s3.change(bucket, lambda data: data[:-100])
            truncated = engine.generate([ask(image) for image in IMAGES[4:6]])
            s3.change(bucket, flipped)
            changed = engine.generate([ask(image) for image in IMAGES[6:8]])
            count = counters(engine)
    assert tokens(truncated) == tokens(right[4:6])
    assert tokens(changed) == tokens(right[6:8])
    assert count["fetch_corrupt"] == 4
    assert count["encoded"] == 4
    assert count["upload_ok"] == 0, "a consumer saves nothing"


@pytest.fixture(scope="module")
def by_proxy(pictures: Pictures, s3: S3Server, filled: str) -> Iterator[tuple[Proxy, Engine]]:
    """An engine, and what is between it and the bucket. Each test has images of its own."""
    settings = {
        "max_wait_ms": 4_000,
        "request_timeout_ms": 10_000,
        "max_attempts": 1,
        "hedge_percent": 0.0,
    }
    with (
        proxy(str(s3.url)) as store,
        pictures(ec_connector(s3, filled, endpoint_url=store.url, **settings)) as engine,
    ):
        yield store, engine


def test_requests_for_one_image_share_a_fetch_and_aborts_leave_nothing(
    by_proxy: tuple[Proxy, Engine], right: list[Answer]
) -> None:
    slow, engine = by_proxy
    engine.generate([ask(1)])
    before, encoded = slow.statistics().requests["GET"], counters(engine)["encoded"]
    slow.fault(Fault(kind="delay", verbs=("GET",), seconds=2.0))
    crowd = [ask(2) for _ in range(6)] + [ask(2, abort_after_s=0.3), ask(3, abort_after_s=0.3)]
    answers = engine.generate(crowd, concurrency=len(crowd))
    assert tokens(answers[:6]) == [right[1].tokens] * 6
    assert [answer.finish_reason for answer in answers[6:]] == ["abort", "abort"]
    assert slow.statistics().requests["GET"] - before == 2
    slow.lift()
    assert tokens(engine.generate([ask(3), ask(4)])) == tokens(right[2:4])
    assert counters(engine)["encoded"] == encoded


def test_a_store_in_trouble_costs_an_encoder_run_and_nothing_else(
    by_proxy: tuple[Proxy, Engine], right: list[Answer]
) -> None:
    """Slow beyond the deadline, then failing, then gone; and back again."""
    store, engine = by_proxy
    before = counters(engine)
    store.fault(Fault(kind="delay", verbs=("GET",), seconds=6.0))
    assert tokens(engine.generate([ask(5)])) == tokens(right[4:5])
    assert counters(engine)["deadline_cuts"] == before["deadline_cuts"] + 1
    store.fault(s3_error(500, "InternalError"))
    assert tokens(engine.generate([ask(6), ask(7)])) == tokens(right[5:7])
    store.fault(Fault(kind="refuse"))
    assert tokens(engine.generate([ask(8), ask(9), ask(10)])) == tokens(right[7:10])
    count = counters(engine) - before
    assert count["encoded"] == 6
    assert count["hits"] == 0
    assert count["fetch_failed"] >= 3
    store.lift()
    time.sleep(1.0)  # twice the breaker's first pause
    assert tokens(engine.generate([ask(11), ask(12)])) == tokens(right[10:])
    assert counters(engine)["hits"] == before["hits"] + 2


@pytest.mark.long
def test_ranks_in_processes_of_their_own_share_one_fetch(
    pictures: Pictures, s3: S3Server, filled: str
) -> None:
    """Two tensor ranks map the scheduler's slab, and find what an engine with one rank has saved.
    Their tokens are not compared: two halves of a matrix round differently."""
    sizes = {"in_process": False, "tensor_parallel_size": 2}
    with pictures(ec_connector(s3, filled), **sizes) as engine:
        answers = engine.generate([ask(image) for image in IMAGES], concurrency=4)
        count = counters(engine)
    assert all(answer.finish_reason == "length" for answer in answers)
    found = count["hits"], count["encoded"], count["fetches"]
    assert found == (len(IMAGES), 0, len(IMAGES)), count
    assert count["fetch_bytes"] == len(IMAGES) * ITEM_BYTES


def test_keys_and_values_and_images_together(
    pictures: Pictures, s3: S3Server, bucket: str, right: list[Answer]
) -> None:
    """Both connectors in one engine, after a restart: one prompt's prefix comes from the bucket and
    covers its image, which is then not asked for; another's image does."""
    long = Ask([20 + n % 400 for n in range(400)], images=[1])
    args = {"enable_prefix_caching": True, "connector": patient_for(s3, bucket)}
    ec = ec_connector(s3, bucket)
    with pictures(ec, **args) as engine:
        cold = engine.generate([long, ask(2)])
        assert counters(engine)["encoded"] == 2
        engine.call("lab.audit:audit")
    with pictures(ec, **args) as engine:
        warm = engine.generate([long, ask(2)])
        metrics, count = engine.metrics(), counters(engine)
        assert (count["hits"], count["encoded"], count["fetches"]) == (1, 0, 1)
        engine.reset_prefix_cache(connector=True)  # weights have changed, in the encoder as well
        engine.call("vllm.v1.engine.llm_engine:LLMEngine.reset_encoder_cache")
        engine.generate([ask(2)])
        assert (counters(engine)["hits"], counters(engine)["encoded"]) == (1, 1)
    assert warm[1].tokens == right[1].tokens == cold[1].tokens
    assert warm[0].cached_tokens == 384
    assert metrics["vllm:s3kv_hit_tokens_bucket_total"] == 384
