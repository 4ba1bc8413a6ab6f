"""The memory of an object, in one buffer and in two, against a plain byte string."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from s3kv.place import Place, copy_bytes

CONTENT = bytes(range(32))


def adjoining(seam: int) -> Place:
    return Place.of(bytearray(CONTENT), seam)


def apart(seam: int) -> Place:
    header, payload = bytearray(CONTENT[:seam]), bytearray(CONTENT[seam:])
    return Place(memoryview(header), memoryview(payload))


NUMBER = st.integers(0, len(CONTENT))


@pytest.mark.parametrize("make", [adjoining, apart])
@given(seam=NUMBER, bounds=st.tuples(NUMBER, NUMBER), inner=st.tuples(NUMBER, NUMBER))
def test_parts_are_the_bytes_of_their_numbers(
    make: Callable[[int], Place], seam: int, bounds: tuple[int, int], inner: tuple[int, int]
) -> None:
    place, expected = make(seam), bytearray(CONTENT)
    begin, end = sorted(bounds)
    part = place.cut(begin, end)
    assert (bytes(part), part.nbytes) == (CONTENT[begin:end], end - begin)
    assert bytes(part.header) == CONTENT[begin : max(begin, min(seam, end))]
    assert all(part.views)
    assert len(part.views) <= (1 if make is adjoining else 2)
    assert all(len(piece) <= 3 for piece in part.pieces(3))
    assert b"".join(part.pieces(3)) == bytes(part)
    first, last = (min(number, part.nbytes) for number in sorted(inner))
    part.cut(first, last).write(b"\xee" * (last - first))
    expected[begin + first : begin + last] = b"\xee" * (last - first)
    assert bytes(place) == expected


@pytest.mark.parametrize("make", [adjoining, apart])
@pytest.mark.parametrize("begin", [0, 16, 31, 40])
def test_bytes_that_do_not_fit_are_refused(make: Callable[[int], Place], begin: int) -> None:
    with pytest.raises(ValueError, match="different structures"):
        make(8).write(bytes(33 - min(begin, 32)), begin)


@given(lengths=st.lists(st.integers(0, 9), max_size=4), more=st.integers(0, 3))
def test_parts_are_copied_one_behind_the_other(lengths: list[int], more: int) -> None:
    """Bytes, and views of memory that may be written."""
    data = [bytes(range(number, number + length)) for number, length in enumerate(lengths)]
    parts = [
        memoryview(bytearray(part)) if number % 2 else part for number, part in enumerate(data)
    ]
    nbytes = sum(lengths)
    target = bytearray(b"\xee" * (nbytes + more + 1))
    assert copy_bytes(parts, target) == nbytes
    assert target == b"".join(data) + b"\xee" * (more + 1)
    assert copy_bytes(parts, memoryview(target)[: nbytes + more]) == nbytes


def test_parts_that_do_not_fit_are_refused() -> None:
    target = bytearray(9)
    with pytest.raises(ValueError, match="10 bytes for 8"):
        copy_bytes([b"12345", b"67890"], memoryview(target)[:8])
    assert target == b"12345" + bytes(4)
