"""What is known of encoder items: the lengths of their objects, and the encoder's speed."""

from __future__ import annotations

import pytest

from s3kv.objects.item_format import object_bytes
from s3kv.planning.items import EncodingPace, ItemSizes, Wanted
from s3kv.types import ChunkKey

WIDTH = 64


def wanted(rows: int = 10, modality: str = "image") -> Wanted:
    return Wanted("name", ChunkKey(0, b"hash"), rows, modality)


def nbytes(rows: int, width: int) -> int:
    return object_bytes("BF16", rows, width)


def test_the_first_item_of_a_modality_tells_the_width_of_the_others() -> None:
    sizes = ItemSizes("BF16", WIDTH, most=2**20)
    sizes.arrived(wanted(), nbytes(10, 2 * WIDTH))
    assert sizes.room(wanted(rows=30)) == nbytes(30, 2 * WIDTH)
    assert sizes.room(wanted(modality="audio")) == nbytes(10, 8 * WIDTH)


def test_what_is_certainly_too_long_gets_no_room() -> None:
    sizes = ItemSizes("BF16", WIDTH, nbytes(10, WIDTH))
    assert sizes.room(wanted()) == nbytes(10, WIDTH), "it may be narrow enough"
    assert sizes.room(wanted(rows=11)) is None
    sizes.arrived(wanted(), nbytes(10, 2 * WIDTH))
    assert sizes.room(wanted()) is None


def test_the_first_measured_encoding_replaces_the_assumed_speed() -> None:
    pace = EncodingPace(encode_rows_per_s=1.0)
    assert pace.encode_s(100) == pytest.approx(100.0)
    pace.encoded(100, 0.0)
    assert pace.encode_s(100) == pytest.approx(100.0), "no time passed: nothing measured"
    pace.encoded(100, 1.0)
    assert pace.encode_s(100) == pytest.approx(1.0)
    pace.encoded(200, 1.0)
    assert pace.encode_s(120) == pytest.approx(1.0)
