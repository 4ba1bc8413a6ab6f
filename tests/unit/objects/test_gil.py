"""Digests, the codec and the cipher leave the GIL to the loop that receives and sends meanwhile."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable

import blosc2
import pytest

from s3kv.objects.compression import Blosc2
from s3kv.objects.encryption import MasterKey
from s3kv.objects.integrity import Integrity
from s3kv.objects.keys import ChunkAddress, Namespace
from s3kv.types import ChunkKey

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
    assert compressed is not None
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
