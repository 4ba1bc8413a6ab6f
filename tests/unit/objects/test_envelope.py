"""Compressed objects: what was encoded comes back, and nothing else does."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise
from typing import Any, get_args

import blosc2
import pytest
import safetensors.torch
import xxhash
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from s3kv.objects import envelope as module
from s3kv.objects.codec import ALIGN_BYTES, ChunkFormat
from s3kv.objects.compression import Blosc2
from s3kv.objects.envelope import Decoding, Envelope, Segments
from s3kv.objects.headers import MAX_HEADER_BYTES, Mismatch, read_header
from s3kv.objects.integrity import Integrity
from s3kv.place import Place
from s3kv.types import _ITEM_BYTES, TensorSpec, item_bytes
from tests.unit.objects.test_compression import KINDS, numbers


class Eager(Blosc2):
    """Overwrites its target before it reads the data, as a decoder may."""

    def decode(self, data: memoryview, target: memoryview, item_bytes: int) -> bool:
        target[:] = b"\xee" * len(target)
        return super().decode(data, target, item_bytes)


CODEC = Eager(blosc2)
DIGEST = "0123456789abcdef" * 2
HASH = bytes(range(32))
KEY = bytes(range(32))
GUARD = 8192
SEGMENT_BYTES = 1024
MODES = ("xxh3", "blake3-keyed")


@pytest.fixture(autouse=True, scope="module")
def _short_segments() -> Iterator[None]:
    """Segments of 1 KiB, so that small objects have several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SEGMENT_BYTES", SEGMENT_BYTES)
        patch.setattr(module, "LEAST_PAYLOAD_BYTES", 2000)
        yield


def kv(name: str = "g0", pages: int = 300, dtype: str = "BF16") -> TensorSpec:
    layers = tuple(TensorSpec(f"layers.{n}.kv", dtype, (pages,), (), "C") for n in range(2))
    return TensorSpec.of_layers(name, 2, layers)


MIXED = TensorSpec.of_layers(
    "g1", 2, (TensorSpec("a", "F32", (201,), (), "C"), TensorSpec("b", "U8", (3,)))
)
FORMAT = ChunkFormat(
    DIGEST, (kv(), MIXED, TensorSpec("rest", "U8", (700,))), 1, "h0-3of8-l0-31of32", first_block=3
)
KEYED = dataclasses.replace(FORMAT, integrity=Integrity("blake3-keyed", KEY))
FORMATS = pytest.mark.parametrize("form", [FORMAT, KEYED], ids=MODES)


def payload_of(form: ChunkFormat, seed: int = 1, kinds: tuple[str, ...] = ("usual",)) -> bytes:
    rng = random.Random(seed)
    parts = []
    for tensor in form.tensors:
        size = max(item_bytes(spec.dtype) for spec in (tensor, *tensor.layers))
        data = numbers(rng.choice(kinds), tensor.nbytes // size + 1, size, rng)
        parts.append(data[: tensor.nbytes])
    return b"".join(parts)


def encoded(
    form: ChunkFormat, payload: bytes, block_hash: bytes = HASH, *, is_padded: bool = False
) -> bytes | None:
    place = Place(memoryview(bytearray(form.header_bytes)), memoryview(payload))
    pieces = Envelope(form).encode(place, block_hash, CODEC, lambda: False, is_padded=is_padded)
    return pieces and b"".join(pieces)


def good(form: ChunkFormat = FORMAT, block_hash: bytes = HASH, seed: int = 1) -> bytes:
    return encoded(form, payload_of(form, seed), block_hash)


class Arena:
    """A place of a format, with other memory around it, and between header and payload."""

    def __init__(self, form: ChunkFormat, is_apart: bool = False, extra: int = 0) -> None:
        self._begin = GUARD + (GUARD if is_apart else 0)
        self._seam = form.header_bytes
        self._memory = bytearray(b"\xa5" * (self._begin + form.object_bytes + extra + GUARD))
        view = memoryview(self._memory)
        payload = view[self._begin + self._seam :][: form.payload_bytes + extra]
        if is_apart:
            self.place = Place(view[GUARD : GUARD + self._seam], payload)
        else:
            self.place = Place.of(view[GUARD : -GUARD or None], self._seam)
        self._is_apart = is_apart

    def is_intact(self) -> bool:
        """Whether nothing has been written outside of the place."""
        around = [self._memory[:GUARD], self._memory[-GUARD:]]
        if self._is_apart:
            around.append(self._memory[GUARD + self._seam : self._begin + self._seam])
        return all(part == b"\xa5" * len(part) for part in around)


def refusal(data: bytes, form: ChunkFormat = FORMAT, codec: Any = CODEC) -> Mismatch | None:
    """The reason why the object is refused. Fails if anything outside of its place is written, or
    a payload is accepted that nobody wrote."""
    arena = Arena(form)
    decoding = Decoding(Envelope(form), arena.place, len(data), HASH, codec)
    decoding.place_of(range(len(data))).write(data)
    decoding.advance(len(data))
    assert decoding.is_done
    assert arena.is_intact()
    return decoding.reason


dtypes = st.sampled_from(sorted(_ITEM_BYTES))


@st.composite
def tensors(draw: Any) -> tuple[TensorSpec, ...]:
    blocks = draw(st.integers(1, 3))
    parts = []
    for number in range(draw(st.integers(1, 3))):
        if draw(st.booleans()):
            name, count = f"t{number}", draw(st.integers(0, 3000))
            parts.append(TensorSpec(name, draw(dtypes), (count,)))
            continue
        layers = tuple(
            TensorSpec(f"layer.{number}.{n}", draw(dtypes), (draw(st.integers(1, 900)),))
            for n in range(draw(st.integers(1, 3)))
        )
        parts.append(TensorSpec.of_layers(f"t{number}", blocks, layers))
    return tuple(parts)


@given(
    parts=tensors(),
    mode=st.sampled_from(MODES),
    kinds=st.sets(st.sampled_from(KINDS), min_size=1).map(lambda kinds: tuple(sorted(kinds))),
    is_apart=st.booleans(),
    is_padded=st.booleans(),
    extra=st.integers(0, 100),
    steps=st.sets(st.integers(1, 2**14), max_size=10),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=300)
def test_an_object_comes_back_while_it_arrives(
    parts: tuple[TensorSpec, ...],
    mode: Any,
    kinds: tuple[str, ...],
    is_apart: bool,
    is_padded: bool,
    extra: int,
    steps: set[int],
    seed: int,
) -> None:
    form = ChunkFormat(DIGEST, parts, 0, "whole", Integrity(mode, KEY))
    payload = payload_of(form, seed, kinds)
    data = encoded(form, payload, is_padded=is_padded)
    assume(data is not None)
    assert len(data) < form.object_bytes
    arena, rng = Arena(form, is_apart, extra), random.Random(seed)
    decoding = Decoding(Envelope(form), arena.place, len(data), HASH, CODEC)
    cuts = sorted({0, len(data), *(step for step in steps if step < len(data))})
    for begin, end in pairwise(cuts):
        decoding.place_of(range(begin, end)).write(data[begin:end])
        decoding.advance(end, is_over=lambda: rng.random() < 0.3)
    while not decoding.is_done:
        decoding.advance(len(data), is_over=lambda: rng.random() < 0.3)
    assert decoding.reason is None
    assert bytes(arena.place.payload[: form.payload_bytes]) == payload
    assert arena.is_intact()


def test_padded_objects_have_one_of_few_lengths_whatever_their_content() -> None:
    form = ChunkFormat(DIGEST, (kv(pages=3000),), 1, "h0-3of8-l0-31of32")
    lengths: list[set[int]] = [set(), set()]
    for seed in range(200):
        payload = payload_of(form, seed, ("usual",) if seed < 100 else KINDS)
        for is_padded in (False, True):
            data = encoded(form, payload, is_padded=is_padded)
            lengths[is_padded] |= {len(data)} if data else set()
    unit = -(-form.payload_bytes // 64)
    header_bytes = Envelope(form).header_bytes
    assert all((nbytes - header_bytes) % unit == 0 for nbytes in lengths[True])
    assert len(lengths[True]) <= 64 < len(lengths[False])


@pytest.mark.parametrize("change", [-1, 1])
def test_no_other_padding_is_accepted(change: int) -> None:
    envelope, data = Envelope(FORMAT), encoded(FORMAT, payload_of(FORMAT), is_padded=True)
    segments = envelope.listed(data[: envelope.header_bytes], HASH, len(data))
    assert segments.padding > 1
    header = envelope.header(HASH, segments._replace(padding=segments.padding + change))
    assert envelope.listed(header, HASH, len(data) + change) is None
    assert safetensors.torch.load(data)["segments"].numel() == len(data) - envelope.header_bytes


def test_no_segment_is_decoded_over_itself() -> None:
    """Whatever the number of bytes by which a segment and what it is stored as overlap."""
    data, payload = good(), payload_of(FORMAT)
    for extra in range(FORMAT.object_bytes - len(data) + 2):
        arena = Arena(FORMAT, extra=extra)
        decoding = Decoding(Envelope(FORMAT), arena.place, len(data), HASH, CODEC)
        decoding.place_of(range(len(data))).write(data)
        decoding.advance(len(data))
        assert bytes(arena.place.payload[: FORMAT.payload_bytes]) == payload
        assert arena.is_intact()


@FORMATS
def test_segments_are_decoded_as_soon_as_they_are_there(form: ChunkFormat) -> None:
    data, payload, arena = good(form), payload_of(form), Arena(form)
    decoding = Decoding(Envelope(form), arena.place, len(data), HASH, CODEC)
    decoding.place_of(range(len(data))).write(data)
    seen = []
    while not decoding.is_done:
        wanted = decoding.wanted_bytes
        decoding.advance(wanted - 1)
        assert decoding.wanted_bytes == wanted
        decoding.advance(wanted)
        seen.append(wanted)
    assert seen == [*accumulate(stored(form, data).lengths, initial=Envelope(form).header_bytes)]
    assert bytes(arena.place.payload) == payload


def test_whole_segments_of_a_usual_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SEGMENT_BYTES", 2**20)
    monkeypatch.setattr(module, "LEAST_PAYLOAD_BYTES", 2**18)
    form = ChunkFormat(DIGEST, (kv(pages=2**19 // 4 + 7), TensorSpec("x", "U8", (9,))), 0, "whole")
    envelope = Envelope.of(form)
    assert [len(segment) for segment in envelope.segments] == [2**20, 56, 9]
    assert envelope.item_bytes == (2, 2, 1)
    payload = payload_of(form)
    data = encoded(form, payload)
    assert len(data) < 0.75 * form.object_bytes
    arena = Arena(form, is_apart=True)
    decoding = Decoding(envelope, arena.place, len(data), HASH, CODEC)
    decoding.place_of(range(len(data))).write(data)
    decoding.advance(len(data))
    assert (decoding.reason, decoding.is_done) == (None, True)
    assert bytes(arena.place.payload) == payload


# --- the header ----------------------------------------------------------------------------------


@FORMATS
def test_safetensors_and_the_parser_read_it(form: ChunkFormat) -> None:
    data = good(form)
    header_bytes = Envelope(form).header_bytes
    read = safetensors.torch.load(data)
    assert list(read) == ["segments"]
    assert bytes(read["segments"].tolist()) == data[header_bytes:]
    said = read_header(memoryview(data))
    assert said == read_header(memoryview(data)[:header_bytes], object_bytes=len(data))
    assert (said.codec, said.tensors, said.block_hash) == ("blosc2", form.tensors, HASH)
    assert (said.header_bytes, said.payload_bytes) == (header_bytes, len(data) - header_bytes)
    assert len(said.digests) == len(Envelope(form).segments)


@given(
    layers=st.integers(1, 60), block_hash=st.binary(min_size=1, max_size=64), seed=st.integers(0)
)
def test_a_header_fits_whatever_it_lists(layers: int, block_hash: bytes, seed: int) -> None:
    parts = tuple(kv(f"g{n}", 100 + n) for n in range(layers))
    envelope = Envelope(ChunkFormat(DIGEST, parts, 0, "whole"))
    rng = random.Random(seed)
    lengths = [rng.randint(1, len(segment)) for segment in envelope.segments]
    decoded = [rng.randbytes(8).hex().encode() for _ in lengths]
    digests = [rng.randbytes(16).hex().encode() for _ in lengths]
    most = [len(segment) for segment in envelope.segments]
    for some in (lengths, most):
        segments = Segments(some, decoded, digests)
        header = envelope.header(block_hash, segments)
        assert len(header) == envelope.header_bytes
        assert header[-1:] in (b" ", b"}")
        assert envelope.listed(header, block_hash, len(header) + sum(some)) == segments
    longest = envelope.header(bytes(64), Segments(most, decoded, digests)).rstrip()
    assert envelope.header_bytes - ALIGN_BYTES < len(longest) <= envelope.header_bytes


@pytest.mark.parametrize("block_hash", [b"", bytes(65)])
def test_a_hash_has_1_to_64_bytes(block_hash: bytes) -> None:
    with pytest.raises(ValueError, match="block hash of"):
        Envelope(FORMAT).header(block_hash, Segments([1] * 6, [b""] * 6))


def test_formats_without_a_compressed_form() -> None:
    def of(nbytes: int, mode: Any = "xxh3") -> Envelope | None:
        tensors = (TensorSpec("t", "U8", (nbytes,)),)
        return Envelope.of(ChunkFormat(DIGEST, tensors, 0, "whole", Integrity(mode, KEY)))

    assert of(2000) is not None
    assert of(1999) is None
    assert of(2000, "none") is None
    assert of(SEGMENT_BYTES * (MAX_HEADER_BYTES // 40 + 1)) is None


def test_an_object_that_would_not_be_shorter_is_not_encoded() -> None:
    assert encoded(FORMAT, payload_of(FORMAT, kinds=("noise",))) is None
    assert encoded(FORMAT, payload_of(FORMAT, kinds=("zero",))) is None  # Blosc2 has no data then


def test_encoding_can_be_given_up() -> None:
    payload, calls = payload_of(FORMAT), 0
    place = Place(memoryview(bytearray(FORMAT.header_bytes)), memoryview(payload))

    def is_over() -> bool:
        nonlocal calls
        calls += 1
        return calls == 4

    assert Envelope(FORMAT).encode(place, HASH, CODEC, is_over) is None
    assert calls == 4


# --- damage --------------------------------------------------------------------------------------


def stored(form: ChunkFormat, data: bytes, block_hash: bytes = HASH) -> Any:
    return Envelope(form).listed(data[: Envelope(form).header_bytes], block_hash, len(data))


def decoded_of(form: ChunkFormat, seed: int = 1) -> list[bytes]:
    """The digests of the decoded segments of `good`."""
    payload = payload_of(form, seed)
    return [digest_of(payload[it.start : it.stop]) for it in Envelope(form).segments]


def digest_of(segment: bytes) -> bytes:
    return xxhash.xxh3_64_hexdigest(segment).encode()


@FORMATS
def test_every_flipped_bit_of_a_header_is_refused(form: ChunkFormat) -> None:
    data = bytearray(good(form))
    assert refusal(bytes(data), form) is None
    reasons = set()
    for bit in range(8 * Envelope(form).header_bytes):
        data[bit // 8] ^= 1 << bit % 8
        reasons.add(refusal(bytes(data), form))
        data[bit // 8] ^= 1 << bit % 8
    assert None not in reasons
    assert reasons <= {*get_args(Mismatch)} - {"codec"}
    assert reasons >= {"header", "version", "namespace", "shard", "block_hash", "digest"}


@FORMATS
def test_a_flipped_bit_of_a_segment_is_refused(form: ChunkFormat) -> None:
    data = bytearray(good(form))
    begin = 8 * Envelope(form).header_bytes
    for bit in random.Random(2).sample(range(begin, 8 * len(data)), 500):
        data[bit // 8] ^= 1 << bit % 8
        assert refusal(bytes(data), form) == "digest"
        data[bit // 8] ^= 1 << bit % 8


@FORMATS
def test_an_object_of_another_length_is_refused(form: ChunkFormat) -> None:
    data = good(form)
    lengths = {*random.Random(4).sample(range(len(data)), 100), 0, 1, 7, 8, 4095, 4096, 4097}
    for nbytes in lengths:
        assert refusal(data[:nbytes], form) == (
            "header" if nbytes < Envelope(form).header_bytes else "length"
        )
    for more in (1, 4096, form.object_bytes - len(data) - 1):
        if len(data) + more < form.object_bytes:
            assert refusal(data + bytes(more), form) == "length"


def test_a_shorter_plain_object_is_refused() -> None:
    other = dataclasses.replace(FORMAT, tensors=FORMAT.tensors[:2])
    for form, nbytes in ((FORMAT, FORMAT.object_bytes - 1), (other, other.object_bytes)):
        data = bytearray(form.object_bytes)
        form.seal(Place.of(data, form.header_bytes), HASH)
        assert refusal(bytes(data[:nbytes])) == "length"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"namespace_digest": "f" * 32}, "namespace"),
        ({"coverage": 2}, "coverage"),
        ({"shard": "h4-7of8-l0-31of32"}, "shard"),
        ({"first_block": 4}, "blocks"),
        ({"tensors": (*FORMAT.tensors[:2], TensorSpec("text", "U8", (700,)))}, "tensors"),
        ({"tensors": (kv(dtype="F16"), *FORMAT.tensors[1:])}, "tensors"),
        ({"tensors": FORMAT.tensors[:2]}, "tensors"),
        ({"integrity": KEYED.integrity}, "algorithm"),
    ],
)
def test_an_object_of_another_format_is_refused(change: dict[str, Any], reason: str) -> None:
    assert refusal(good(dataclasses.replace(FORMAT, **change))) == reason


@FORMATS
def test_an_object_of_another_chunk_is_refused(form: ChunkFormat) -> None:
    assert refusal(good(form, b"\1" * 32), form) == "block_hash"
    assert refusal(good(form, b"\1" * 31), form) == "block_hash"


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (b'"s3kv.format":"3"', b'"s3kv.format":"2"', "version"),
        (b'"s3kv.codec":"blosc2"', b'"s3kv.codec":"blosc3"', "header"),
        (b'"s3kv.codec":"blosc2"', b'"s3kv.codec":""      ', "header"),
        (b'"segments":', b'"sediment":', "header"),
        (b"}} ", b"} }", "header"),
        (b"s3kv.stored", b"s3kv.stared", "header"),
        (b"[2,2,300]", b"[2,3,200]", "tensors"),
    ],
)
def test_an_altered_header_is_refused(old: bytes, new: bytes, reason: str) -> None:
    data = good()
    assert data.count(old) == 1
    assert refusal(data.replace(old, new)) == reason


def test_without_a_codec_an_object_is_not_called_damaged() -> None:
    data = good()
    assert refusal(data, codec=None) == "codec"
    assert refusal(data[:-1], codec=None) == "length"
    assert refusal(good(block_hash=b"\1" * 32), codec=None) == "block_hash"


# --- forgery -------------------------------------------------------------------------------------


def forged(
    form: ChunkFormat,
    pieces: list[bytes],
    lengths: list[int] | None = None,
    key: bytes = KEY,
    decoded: list[bytes] | None = None,
) -> bytes:
    """An object of these stored segments, with digests that fit, by somebody who has `key`."""
    envelope = Envelope(form)
    lengths = lengths or [len(piece) for piece in pieces]
    segments = Segments(lengths, decoded or (decoded_of(form) * 2)[: len(lengths)])
    covered = envelope.header(HASH, segments)
    sealing = dataclasses.replace(form.integrity, key=key if form.integrity.key else b"")
    digests = [
        sealing.digest(covered, number, memoryview(piece)).encode()
        for number, piece in enumerate(pieces)
    ]
    return envelope.header(HASH, segments._replace(digests=digests)) + b"".join(pieces)


def pieces_of(form: ChunkFormat, data: bytes) -> list[bytes]:
    bounds = accumulate(stored(form, data).lengths, initial=Envelope(form).header_bytes)
    return [data[begin:end] for begin, end in pairwise(bounds)]


@FORMATS
def test_what_is_forged_with_the_key_is_as_good(form: ChunkFormat) -> None:
    """So the next tests are refused for what they change."""
    data = good(form)
    assert forged(form, pieces_of(form, data)) == data


LENGTHS: dict[str, Callable[[list[int]], list[int]]] = {
    "zero": lambda it: [0, it[0] + it[1], *it[2:]],
    "more than a segment has": lambda it: [it[0] + it[1] + it[2] - 2, 1, 1, *it[3:]],
    "too few": lambda it: [*it[:-2], it[-2] + it[-1]],
    "too many": lambda it: [*it[:-1], it[-1] - 1, 1],
    "sum too small": lambda it: [*it[:-1], it[-1] - 1],
    "sum too large": lambda it: [it[0] + 1, *it[1:]],
    "six digits of f": lambda it: [0xFFFFFF, *it[1:]],
}


@FORMATS
@pytest.mark.parametrize("name", LENGTHS)
def test_lengths_that_lie_are_refused(form: ChunkFormat, name: str) -> None:
    pieces = pieces_of(form, good(form))
    data = forged(form, pieces, LENGTHS[name]([len(piece) for piece in pieces]))
    assert refusal(data, form) in ("length", "header", "digest")
    assert stored(form, data) is None


@FORMATS
def test_no_segment_is_stored_in_no_bytes(form: ChunkFormat) -> None:
    data = forged(form, [b"", *pieces_of(form, good(form))[1:]])
    assert stored(form, data) is None
    assert refusal(data, form) == "header"


@FORMATS
@pytest.mark.parametrize("text", ["-00001", "+00001", "00000A", " 00001", "0_0001", "0x0001"])
def test_lengths_have_one_spelling(form: ChunkFormat, text: str) -> None:
    data = good(form)
    first = f"{stored(form, data).lengths[0]:06x}"
    other = data.replace(f'"s3kv.stored":"{first}'.encode(), f'"s3kv.stored":"{text}'.encode())
    assert len(other) == len(data)
    assert refusal(other, form) == "header"


@FORMATS
def test_lengths_that_share_the_bytes_otherwise_are_refused(form: ChunkFormat) -> None:
    """The sum is right. Without a key the digests are, too, and the chunks of Blosc2 are not."""
    data = good(form)
    lengths = stored(form, data).lengths
    joined = data[Envelope(form).header_bytes :]
    bounds = accumulate([lengths[0] - 1, lengths[1] + 1, *lengths[2:]], initial=0)
    pieces = [joined[begin:end] for begin, end in pairwise(bounds)]
    assert refusal(forged(form, pieces), form) == "digest"


@FORMATS
@pytest.mark.parametrize("end", [None, 32], ids=["a longer segment", "a header alone"])
@pytest.mark.parametrize("number", [0, 1, 5])
def test_chunks_that_lie_are_refused(form: ChunkFormat, end: int | None, number: int) -> None:
    """Digests fit. Blosc2 would believe these headers, and write beyond the segment or the place.
    Segments 0 and 1 are copied before they are decoded or not; segment 5 is the last."""
    envelope = Envelope(form)
    pieces = pieces_of(form, good(form))
    nbytes, size = len(envelope.segments[number]), envelope.item_bytes[number]
    lie = (b"some text that shrinks. " * nbytes)[: nbytes + GUARD // 2]
    chunk = CODEC.encode(memoryview(lie), size)
    pieces[number] = chunk[:end]
    assert len(pieces[number]) < nbytes
    decoded = decoded_of(form)
    decoded[number] = digest_of(lie[:nbytes])
    assert refusal(forged(form, pieces, decoded=decoded), form) == "digest"


def test_without_a_key_segments_can_be_exchanged_and_with_one_they_cannot() -> None:
    for form, reason in ((FORMAT, None), (KEYED, "digest")):
        data = good(form)
        pieces = pieces_of(form, data)
        pieces[0], pieces[1] = pieces[1], pieces[0]
        _, decoded, digests, _ = stored(form, data)
        for listed in (decoded, digests):
            listed[0], listed[1] = listed[1], listed[0]
        segments = Segments([len(piece) for piece in pieces], decoded, digests)
        assert refusal(Envelope(form).header(HASH, segments) + b"".join(pieces), form) == reason
        assert refusal(data[: Envelope(form).header_bytes] + b"".join(pieces), form) == "digest"


def test_without_the_key_nothing_can_be_forged() -> None:
    data, other = good(KEYED), good(KEYED, seed=2)
    pieces = pieces_of(KEYED, data)
    assert refusal(forged(KEYED, pieces, key=bytes(32)), KEYED) == "digest"
    _, decoded, digests, _ = stored(KEYED, data)
    _, other_decoded, theirs, _ = stored(KEYED, other)
    for number, piece in enumerate(pieces_of(KEYED, other)):  # of another object of this chunk
        mixed = [*pieces[:number], piece, *pieces[number + 1 :]]
        lists = [
            [*ours[:number], others[number], *ours[number + 1 :]]
            for ours, others in ((decoded, other_decoded), (digests, theirs))
        ]
        header = Envelope(KEYED).header(HASH, Segments([len(it) for it in mixed], *lists))
        assert refusal(header + b"".join(mixed), KEYED) == "digest"


@pytest.mark.parametrize(
    "digest", [b"", b"0" * 31, b"0" * 33, b'","x":"' + b"0" * 25, b"\xff" * 32]
)
def test_a_digest_that_is_none_is_refused(digest: bytes) -> None:
    data = good()
    segments = stored(FORMAT, data)
    altered = segments._replace(digests=[digest, *segments.digests[1:]])
    header = Envelope(FORMAT).header(HASH, altered)
    assert refusal(header + data[Envelope(FORMAT).header_bytes :]) in ("header", "digest")


class Wrong(Blosc2):
    """A codec with a defect: it decodes one byte in a segment to another."""

    def decode(self, data: memoryview, target: memoryview, item_bytes: int) -> bool:
        is_decoded = super().decode(data, target, item_bytes)
        target[-1] ^= 1
        return is_decoded


@FORMATS
def test_a_defect_of_the_codec_is_found(form: ChunkFormat) -> None:
    assert refusal(good(form), form, codec=Wrong(blosc2)) == "digest"
