"""The frames between a worker and its I/O process: round trips, cuts, and hostile bytes."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from s3kv.config import Config
from s3kv.io import wire
from s3kv.messages import BucketJob, JobEnd, JobKind
from s3kv.types import ChunkKey, ItemShape, Outcome, TensorSpec

job_ids = st.integers(0, 2**63 - 1)
keys = st.builds(ChunkKey, st.integers(0, 9), st.binary(min_size=1, max_size=64))
shapes = st.none() | st.builds(ItemShape, job_ids, job_ids)
downs = st.lists(
    st.one_of(
        st.builds(
            BucketJob, job_ids, st.sampled_from(JobKind), keys, job_ids, shapes, st.booleans()
        ),
        st.builds(wire.Cancel, job_ids, st.booleans()),
        st.floats(0, 1e6).map(wire.Drain),
        st.just(wire.Ping()),
    )
)
ups = st.lists(
    st.one_of(
        st.builds(
            JobEnd,
            job_ids,
            st.sampled_from(JobKind),
            st.sampled_from(Outcome),
            job_ids,
            st.floats(0, 1e6),
            detail=st.text(),
            near=st.booleans(),
        ),
        st.builds(wire.Drained, st.integers(0, 9)),
        st.builds(
            wire.Stats,
            *[st.integers(0, 9)] * 4,
            st.dictionaries(st.sampled_from(["io_requests|GET|2xx", "cost_usd"]), job_ids),
        ),
        st.builds(wire.Ready, st.booleans(), st.sampled_from([None, "denied"]), st.text()),
    )
)


@given(st.one_of(downs.map(lambda m: (wire.Down, m)), ups.map(lambda m: (wire.Up, m))), st.data())
def test_every_message_survives_every_cut(case: tuple[object, list[object]], data) -> None:
    direction, messages = case
    stream = wire.encode(messages[:3]) + wire.encode(messages[3:])
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=8))
    bounds = itertools.pairwise(sorted({0, *cuts, len(stream)}))
    reader = wire.FrameReader(direction)
    assert [m for a, b in bounds for m in reader.feed(stream[a:b])] == messages


def test_handshake_carries_the_settings_and_the_formats() -> None:
    handshake = wire.Handshake(
        config=Config(bucket="bkt", endpoint_url="http://127.0.0.1:1", max_wait_ms=7),
        namespace_prefix="s3kv",
        namespace_digest="0" * 32,
        shard="h0-7of8-l0-31of32",
        groups={0: (TensorSpec("layer.0", "BF16", (2, 8, 128, 128)),), 1: ()},
    )
    assert wire.FrameReader(wire.Down).feed(wire.encode([handshake])) == [handshake]


@given(st.text(st.characters(exclude_categories=())))
@example("credentials file /tmp/\udcff is unreadable")
@example("\U0001f600" * 1000)
@example("x" + "\U0001f600" * 1000)
@example("plain")
def test_any_text_is_carried_as_far_as_there_is_room(text: str) -> None:
    """Paths that are not UTF-8, and what a server says, are parts of messages."""
    detail = wire.truncated(text)
    assert len(detail.encode()) <= wire.MAX_DETAIL_BYTES
    sent = JobEnd(1, JobKind.FETCH, Outcome.FAILED, detail=detail)
    assert wire.FrameReader(wire.Up).feed(wire.encode([sent])) == [sent]
    if text.isascii():
        assert detail == text[: wire.MAX_DETAIL_BYTES]


def test_thousands_of_the_longest_details_fit_into_frames() -> None:
    detail = wire.truncated("\U0001f600" * 1000)
    messages = [JobEnd(i, JobKind.FETCH, Outcome.FAILED, detail=detail) for i in range(5000)]
    assert wire.FrameReader(wire.Up).feed(wire.encode(messages)) == messages


def test_a_message_larger_than_a_frame_is_not_sent() -> None:
    tensors = tuple(TensorSpec("n" * 200, "U8", (1,)) for _ in range(6000))
    handshake = wire.Handshake(
        Config(bucket="bkt"), "s3kv", "0" * 32, "h0-7of8-l0-31of32", {0: tensors}
    )
    with pytest.raises(wire.WireError, match="do not fit"):
        wire.encode([handshake])


BODIES = {
    "empty": b"",
    "no array": b"\xc0",
    "truncated array": b"\x92\x91\x05",
    "four thousand million messages announced": b"\xdd\xff\xff\xff\xff",
    "four thousand million bytes announced": b"\x91\x92\x03\xc6\xff\xff\xff\xff",
    "unknown tag": msgspec.msgpack.encode([[99, 1]]),
    "missing field": msgspec.msgpack.encode([[1, 1]]),
    "wrong type": msgspec.msgpack.encode([[3, "one"]]),
    "of the other direction": wire.encode([wire.Drained(0)])[4:],
    "bytes behind the message": wire.encode([wire.Ping()])[4:] + b"\x00",
    "deep nesting": b"\x91" * 5000,
    "a bad bucket name": msgspec.msgpack.encode([[0, {"bucket": "!"}, "", "", "", {}]]),
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_frame_that_says_nothing_known_raises(body: bytes) -> None:
    with pytest.raises(wire.WireError):
        wire.FrameReader(wire.Down).feed(len(body).to_bytes(4, "little") + body)
