"""Where a prefix comes from: the bucket, host memory, the engine's own cache, and any mixture.

Answers are compared token for token with an engine without a connector whose own cache hit just
as much; see `References` for why nothing else will do in bf16. Where hits cannot be made equally
long the engines compute in float32, in which tokens do not depend on the length of the hit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import xxhash

from lab import models
from lab.s3 import S3Server
from s3kv.objects.headers import read_header
from s3kv.objects.keys import parse
from tests.system.e2e.conftest import (
    FLOAT32,
    SECOND,
    START_AND_STOP_S,
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
from tests.system.forms import blank, flipped, plain_bytes, plain_of

PROMPTS = models.prompts(4, 800)
CHUNKS = 6
"""Full chunks of 128 tokens in each prompt."""
HIT = CHUNKS * 128
LOADED = {"load_ok": 4, "load_bytes": 4 * HIT * models.TINY.kv_bytes_per_token}


@dataclass(frozen=True)
class Library:
    """A bucket in which an engine that is gone has saved all of `PROMPTS`. keys: of each prompt's
    chunks, from its start."""

    bucket: str
    keys: list[list[str]]


@pytest.fixture(scope="module")
def library(s3: S3Server, tiny: Path, serve: Serve) -> Iterator[Library]:
    with new_bucket(s3) as bucket:
        keys: list[list[str]] = []
        known: set[str] = set()
        with serve(tiny, patient_for(s3, bucket)) as engine:
            for prompt in PROMPTS:
                chunks = []
                for end in range(128, HIT + 1, 128):
                    engine.generate([prompt[: end + 1]], max_tokens=1)
                    at_rest(engine)
                    (new,) = set(s3.objects(bucket)) - known
                    known.add(new)
                    chunks.append(new)
                keys.append(chunks)
        yield Library(bucket, keys)


# A step takes the second runner three to five times as long.
SLOW = [pytest.mark.long, pytest.mark.timeout(2 * START_AND_STOP_S)]


@pytest.mark.core
@pytest.mark.parametrize(
    "second_runner",
    [pytest.param(False, id="first-runner"), pytest.param(True, id="second-runner", marks=SLOW)],
)
def test_every_tier_serves_a_prefix(rig: Rig, library: Library, second_runner: bool) -> None:
    """On either model runner, from a bucket that the first one has filled."""
    expected = rig.reference(rig.tiny, PROMPTS, second_runner=second_runner)
    assert cached(expected) == [HIT] * 4
    all_chunks = 4 * CHUNKS
    with (
        new_bucket(rig.s3, like=library.bucket) as bucket,
        rig.serve(rig.tiny, patient_for(rig.s3, bucket), second_runner=second_runner) as engine,
    ):
        # A process that has seen nothing: the bucket.
        answers = engine.generate(PROMPTS)
        done = at_rest(engine)
        metrics = engine.metrics()
        assert answered(answers) == answered(expected)
        assert done == {
            "fetches": all_chunks,
            "fetch_ok": all_chunks,
            "fetch_bytes": plain_bytes(rig.s3, bucket),
            "hit_tokens_bucket": 4 * HIT,
            **LOADED,
        }
        assert metrics["vllm:external_prefix_cache_hits_total"] == 4 * HIT
        assert metrics["vllm:s3kv_hit_tokens_bucket_total"] == 4 * HIT
        assert metrics["vllm:s3kv_hit_tokens_host_total"] == 0
        assert metrics["vllm:s3kv_fetch_ok_total"] == all_chunks
        assert metrics["vllm:s3kv_fetch_bytes_total"] == done["fetch_bytes"]
        assert metrics["vllm:s3kv_saves_total"] == 0

        # The engine itself remembers: s3kv is not asked for anything.
        assert answered(engine.generate(PROMPTS)) == answered(expected)
        assert at_rest(engine) == done

        # The engine has forgotten: host memory, and no request to the bucket.
        assert engine.call("lab.audit:reset", connector=False)
        assert answered(engine.generate(PROMPTS)) == answered(expected)
        assert at_rest(engine) - done == {"hit_tokens_host": 4 * HIT} | LOADED

        # All is forgotten, as after a change of weights: nothing old is ever hit again, …
        before = at_rest(engine)
        assert engine.call("lab.audit:reset", connector=True)
        answers = engine.generate(PROMPTS)
        done = at_rest(engine) - before
        assert cached(answers) == [0] * 4
        assert done["fetch_ok"] == done["hit_tokens_host"] == done["hit_tokens_bucket"] == 0
        assert done["upload_ok"] == all_chunks
        assert len(rig.s3.objects(bucket)) == 2 * all_chunks
        # … what is computed from then on is.
        assert engine.call("lab.audit:reset", connector=False)
        before = at_rest(engine)
        assert answered(engine.generate(PROMPTS)) == answered(expected)
        assert at_rest(engine) - before == {"hit_tokens_host": 4 * HIT} | LOADED


def test_bytes_of_the_bucket_decide_the_tokens_unless_they_are_damaged(
    rig: Rig, library: Library
) -> None:
    """Zeroed KV under a valid digest is served and changes the tokens, or this suite proves
    nothing. Any damage is a miss from there on; what was damaged or is missing is saved again."""
    whole = rig.reference(rig.tiny, PROMPTS[:1], **SECOND)
    nothing = rig.reference(rig.tiny, PROMPTS[1:3], hit_tokens=0, **SECOND)
    part = rig.reference(rig.tiny, PROMPTS[3:], hit_tokens=256, **SECOND)
    with new_bucket(rig.s3, like=library.bucket) as bucket:
        broken = [library.keys[1][0], library.keys[2][0], library.keys[2][1], library.keys[3][2]]
        complete = set(rig.s3.objects(bucket))
        rig.s3.change(bucket, zeroed, library.keys[0])
        another = rig.s3.contents(bucket)[library.keys[0][1]]
        rig.s3.change(bucket, flipped, [library.keys[1][0]])
        rig.s3.change(bucket, lambda data: data[:-1], [library.keys[2][0]])
        rig.s3.change(bucket, lambda data: another, [library.keys[2][1]])
        rig.s3.client().delete_object(Bucket=bucket, Key=library.keys[3][2])

        # Chunks behind a damaged one are read, and replaced, only if all are asked for at once.
        at_once = changed(patient_for(rig.s3, bucket), probe_chunks=CHUNKS)
        with rig.serve(rig.tiny, at_once, **SECOND) as engine:
            zeros, *damaged = engine.generate(PROMPTS)
            done = at_rest(engine)
            metrics = engine.metrics()
        kept = rig.s3.contents(bucket)

    assert zeros.cached_tokens == HIT
    assert zeros.tokens != whole[0].tokens
    assert answered(damaged) == ([0, 0, 256], tokens([*nothing, *part]))
    assert done["fetch_corrupt"] == 3
    assert done["fetch_missing"] == 1
    for reason in ("digest", "length", "block_hash"):
        assert done[f"fetch_corrupt_{reason}"] == 1
        assert metrics[f"vllm:s3kv_fetch_corrupt_{reason}_total"] == 1
    assert kept.keys() == complete
    assert broken == [key for key in broken if same_chunk(kept[key], key)]


def test_prompts_of_all_lengths(rig: Rig) -> None:
    """Shorter than a chunk, whole chunks and nothing else, longer than a step of the engine; and
    one that leaves the common prefix before the end of what was saved."""
    (short,) = models.prompts(1, 100, seed=1)
    (whole,) = models.prompts(1, 512, seed=2)
    (long,) = models.prompts(1, 1_500, seed=3)
    (tail,) = models.prompts(1, 1_000, seed=4)
    forked = whole + tail
    short_steps = {"max_num_batched_tokens": 512, **FLOAT32, **SECOND}

    with rig.serve(rig.tiny, rig.patient, **short_steps) as engine:
        asked = [short, whole, long]
        assert answered(engine.generate(asked)) == ([0, 0, 0], rig.truth(asked))
        assert at_rest(engine)["upload_ok"] == 0 + 4 + 11

    with rig.serve(rig.tiny, rig.patient, **short_steps) as engine:
        # The engine's cache answers `whole` but for its last block, which vLLM never takes from
        # there; the bucket's may cover a prompt to its end, of which then one token is computed.
        asked = [short, forked, whole, long]
        assert answered(engine.generate(asked)) == ([0, 512, 512, 1408], rig.truth(asked))
        done = at_rest(engine)
        assert done["hit_tokens_bucket"] + done["hit_tokens_host"] == 512 + 128 + 1_408
        assert done["fetch_ok"] == 4 + 11
        engine.generate([forked])  # saves chunks whose probes had not ended with the first request
        assert at_rest(engine)["upload_ok"] == (512 + 1_000) // 128 - 4


def test_own_hit_ends_within_a_chunk(rig: Rig) -> None:
    """Chunks of two blocks. A prompt that shares three blocks leaves the engine with half of the
    second chunk: the other half comes from host memory, and what it has is not overwritten."""
    (prompt,) = models.prompts(1, 800, seed=5)
    (tail,) = models.prompts(1, 300, seed=6)
    sibling = prompt[: 3 * 128] + tail
    with rig.serve(rig.tiny, changed(rig.patient, chunk_tokens=256), **FLOAT32, **SECOND) as engine:
        engine.generate([prompt])
        assert engine.call("lab.audit:reset", connector=False)
        before = at_rest(engine)
        answers = engine.generate([sibling, prompt])
        done = at_rest(engine) - before
    assert answered(answers) == ([256, 768], rig.truth([sibling, prompt]))
    assert done["hit_tokens_host"] == 256 + (768 - 3 * 128)


def zeroed(data: bytes) -> bytes:
    """The plain object of one segment with a payload of zeros and the digest that goes with it."""
    data = blank(plain_of(data))
    header = read_header(memoryview(data))
    (said,) = header.digests
    digest = xxhash.xxh3_128_hexdigest(data[header.header_bytes :])
    return data.replace(said.encode(), digest.encode(), 1)


def same_chunk(data: bytes, key: str) -> bool:
    """Whether these bytes are a whole object of the chunk that `key` names."""
    header = read_header(memoryview(data))
    address = parse(key)
    whole = (xxhash.xxh3_128_hexdigest(data[header.header_bytes :]),) == header.digests
    return whole and header.block_hash == address.key.block_hash
