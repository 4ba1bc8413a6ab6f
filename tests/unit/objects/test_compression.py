"""Segments come back as they were; and whatever a chunk's header says, nothing else is written."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import blosc2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from s3kv.objects import compression
from s3kv.objects.compression import Blosc2
from s3kv.objects.encryption import MasterKey
from s3kv.objects.integrity import Integrity
from s3kv.objects.keys import ChunkAddress, Namespace
from s3kv.types import ChunkKey

CODEC = Blosc2(blosc2)
GUARD = 4096
SIZES = (1, 2, 4, 8)


def numbers(kind: str, count: int, item_bytes: int, rng: random.Random) -> bytes:
    """Numbers as a KV cache may hold them, little-endian."""
    bits = 8 * item_bytes
    mantissa = {8: 3, 16: 7, 32: 23, 64: 52}[bits]
    exponents = 2 ** (bits - 1 - mantissa)
    if kind == "constant":
        return rng.randbytes(item_bytes) * count
    if kind == "noise":
        return rng.randbytes(count * item_bytes)
    exponent: Callable[[], int] = {
        "zero": lambda: 0,
        "subnormal": lambda: 0,
        "nan": lambda: exponents - 1,
        "usual": lambda: max(0, exponents // 2 - 1 - min(rng.getrandbits(3), rng.getrandbits(3))),
    }[kind]
    values = (
        (rng.getrandbits(1) << bits - 1 | exponent() << mantissa | rng.getrandbits(mantissa))
        if kind != "zero"
        else 0
        for _ in range(count)
    )
    return b"".join(value.to_bytes(item_bytes, "little") for value in values)


KINDS = ("zero", "constant", "subnormal", "nan", "usual", "noise")


def decoded(data: bytes, nbytes: int, item_bytes: int) -> bytes | None:
    """What the codec makes of `data`. Fails if it writes beyond its target."""
    arena = bytearray(b"\xa5" * (nbytes + 2 * GUARD))
    target = memoryview(arena)[GUARD : GUARD + nbytes]
    is_decoded = CODEC.decode(memoryview(data), target, item_bytes)
    assert arena[:GUARD] == arena[GUARD + nbytes :] == b"\xa5" * GUARD
    return bytes(target) if is_decoded else None


@given(
    item_bytes=st.sampled_from(SIZES),
    kind=st.sampled_from(KINDS),
    nbytes=st.integers(1, 9000),
    seed=st.integers(0, 2**32),
)
def test_segments_come_back(item_bytes: int, kind: str, nbytes: int, seed: int) -> None:
    segment = numbers(kind, nbytes // item_bytes + 1, item_bytes, random.Random(seed))[:nbytes]
    data = CODEC.encode(memoryview(segment), item_bytes)
    if data is None:
        return
    assert len(data) < nbytes
    assert nbytes % item_bytes == 0
    assert decoded(data, nbytes, item_bytes) == segment


@pytest.mark.parametrize("item_bytes", SIZES)
def test_usual_numbers_shrink(item_bytes: int) -> None:
    segment = numbers("usual", 2**18 // item_bytes, item_bytes, random.Random(item_bytes))
    data = CODEC.encode(memoryview(segment), item_bytes)
    assert len(data) < 0.96 * len(segment)
    assert decoded(data, len(segment), item_bytes) == segment


@pytest.mark.parametrize("item_bytes", [2, 4, 8])
def test_a_part_of_an_item_is_not_compressed(item_bytes: int) -> None:
    """Blosc2 4 compresses such a segment, and decodes it to other bytes."""
    segment = bytes(8 * 1000 + 1)[:-1] + b"\x07"
    assert CODEC.encode(memoryview(segment), item_bytes) is None
    data = blosc2.compress2(segment, typesize=item_bytes, blocksize=len(segment), **CODEC._settings)
    assert decoded(data, len(segment), item_bytes) is None


def usual(nbytes: int = 4096, item_bytes: int = 2) -> bytes:
    segment = numbers("usual", nbytes // item_bytes, item_bytes, random.Random(3))
    return CODEC.encode(memoryview(segment), item_bytes)


def test_every_bit_of_a_header_is_looked_at() -> None:
    data = usual()
    for bit in range(8 * 32):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        assert decoded(bytes(changed), 4096, 2) is None, bit


def chunks_of_others() -> Iterator[tuple[str, bytes]]:
    segment = numbers("usual", 2048, 2, random.Random(3))
    settings: dict[str, Any] = {**CODEC._settings, "typesize": 2, "blocksize": 4096}

    def chunk(data: bytes = segment, **changes: Any) -> bytes:
        return bytes(blosc2.compress2(data, **settings | changes))

    yield "longer", usual(8192)
    yield "shorter", usual(2048)
    yield "other items", chunk(typesize=4)
    yield "several blocks", chunk(blocksize=1024)
    yield "another codec", chunk(codec=blosc2.Codec.LZ4)
    yield "another filter", chunk(filters=[blosc2.Filter.BITSHUFFLE])
    yield "no filter", chunk(filters=[blosc2.Filter.NOFILTER])
    yield "streams not split", chunk(splitmode=blosc2.SplitMode.NEVER_SPLIT)
    yield "zeros", chunk(bytes(4096))
    yield "stored", chunk(random.Random(5).randbytes(4096))
    yield "truncated", usual()[:-1]
    yield "extended", usual() + b"\0"
    yield "empty", b""
    yield "a header alone", usual()[:32]


@pytest.mark.parametrize(("name", "data"), [*chunks_of_others()])
def test_another_chunk_is_refused(name: str, data: bytes) -> None:
    assert decoded(data, 4096, 2) is None


def test_a_chunk_for_a_shorter_target_is_refused() -> None:
    """Blosc2 itself would write beyond the target here."""
    data = usual(8192)
    for nbytes in (1, 2, 31, 32, 33, 4096, 8190, 8191, 8193):
        assert decoded(data, nbytes, 2) is None


def test_every_call_may_be_made_in_any_thread() -> None:
    rng = random.Random(9)
    segments = [numbers("usual", 2**15, 2, rng) for _ in range(16)]

    def there_and_back(segment: bytes) -> bytes | None:
        data = CODEC.encode(memoryview(segment), 2)
        return data and decoded(data, len(segment), 2)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(there_and_back, segments)) == segments


def codec_with(module: Any, monkeypatch: pytest.MonkeyPatch) -> compression.Codec | None:
    """The codec of a process in which blosc2 is `module`; of one without it for None."""

    def import_module(name: str) -> Any:
        assert name == "blosc2"
        if module is None:
            raise ModuleNotFoundError(name)
        return module

    compression.codec.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(compression.importlib, "import_module", import_module)
        found = compression.codec()
    compression.codec.cache_clear()
    return found


def like_blosc2(**changes: Any) -> SimpleNamespace:
    names = ("compress2", "decompress2", "Codec", "Filter", "set_releasegil")
    return SimpleNamespace(**{name: getattr(blosc2, name) for name in names} | changes)


def newer(*args: Any, **kwargs: Any) -> bytes:
    """A chunk of a later format."""
    data = bytearray(blosc2.compress2(*args, **kwargs))
    data[0] += 1
    return bytes(data)


def wrong(data: Any, dst: Any, **kwargs: Any) -> None:
    blosc2.decompress2(data, dst=dst, **kwargs)
    dst[-1] ^= 1


def test_there_is_a_codec_if_blosc2_writes_this_format(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compression.codec() is compression.codec() is not None
    assert codec_with(like_blosc2(), monkeypatch) is not None
    assert codec_with(None, monkeypatch) is None
    assert codec_with(like_blosc2(compress2=newer), monkeypatch) is None
    assert codec_with(like_blosc2(decompress2=wrong), monkeypatch) is None
    assert codec_with(SimpleNamespace(), monkeypatch) is None


SEGMENT = memoryview(
    random.Random(1).randbytes(2**20).translate(bytes(n // 32 for n in range(256)))
)
NAMESPACE = Namespace("team/s3kv", "0123456789abcdef" * 2)
CALLS = 2_000


def releases_the_gil(call: Callable[[], object]) -> bool:
    """Whether another thread gets to run before the last of `CALLS` calls. Python takes the GIL
    from no thread here, so it does if the calls release it."""
    over = threading.Event()
    calls = 0

    def run() -> None:
        nonlocal calls
        while calls < CALLS and not over.is_set():
            call()
            calls += 1

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1_000)
    try:
        thread = threading.Thread(target=run)
        thread.start()
        over.set()
        thread.join()
    finally:
        sys.setswitchinterval(interval_s)
    return calls < CALLS


def calls() -> dict[str, Callable[[], object]]:
    codec, keyed = Blosc2(blosc2), Integrity("blake3-keyed", bytes(32))
    form = MasterKey(bytes(32)).form_of(ChunkAddress(NAMESPACE, ChunkKey(1, bytes(32)), "h0"))
    compressed, encrypted = codec.encode(SEGMENT, 2), memoryview(bytearray(len(SEGMENT) + 28))
    form.encrypt(SEGMENT, encrypted, 0, len(SEGMENT))
    data, target, sealed = memoryview(compressed), bytearray(SEGMENT), bytearray(encrypted)
    return {
        "compress": lambda: codec.encode(SEGMENT, 2),
        "decompress": lambda: codec.decode(data, memoryview(target), 2),
        "encrypt": lambda: form.encrypt(SEGMENT, memoryview(sealed), 0, len(SEGMENT)),
        "decrypt": lambda: form.decrypt(encrypted, target, 0, len(SEGMENT)),
        "xxh3": lambda: Integrity().digest(b"", 0, SEGMENT),
        "blake3-keyed": lambda: keyed.digest(b"", 0, SEGMENT),
    }


@pytest.mark.parametrize("name", calls())
def test_a_segment_is_processed_without_the_gil(name: str) -> None:
    assert releases_the_gil(calls()[name])


def test_python_alone_keeps_it() -> None:
    assert not releases_the_gil(lambda: sum(range(100)))
