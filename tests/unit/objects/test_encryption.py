"""Encrypted objects: what was encrypted comes back, where it belongs, and nothing else does."""

from __future__ import annotations

import importlib
import json
import random
import sys
from collections import Counter
from typing import Any

import pytest
import safetensors.torch
from hypothesis import given
from hypothesis import strategies as st

from s3kv.errors import ConfigError
from s3kv.objects import encryption, keys
from s3kv.objects.encryption import (
    HEADER_BYTES,
    SEGMENT_BYTES,
    EncryptedForm,
    Keyring,
    MasterKey,
    decrypted_bytes,
    encrypted_bytes,
    encrypted_range,
    segments_in,
)
from s3kv.objects.keys import ChunkAddress, Namespace
from s3kv.types import ChunkKey

MASTER, OTHER = bytes(range(32)), bytes(range(1, 33))
NAMESPACE = Namespace("team/s3kv", "0123456789abcdef" * 2)
ADDRESS = ChunkAddress(NAMESPACE, ChunkKey(1, bytes(range(100, 132))), "h0-3of8-l0-31of32")
KEY = NAMESPACE.chunk(ADDRESS.key, ADDRESS.shard)
DATA = random.Random(1).randbytes(5000)
OBJECT_BYTES = 2 * SEGMENT_BYTES + len(DATA)


def form_of(address: ChunkAddress = ADDRESS, master: bytes = MASTER) -> EncryptedForm:
    return MasterKey(master).form_of(address)


def encrypted(form: EncryptedForm) -> bytearray:
    target = bytearray(len(DATA) + 28)
    form.encrypt(DATA, memoryview(target), 2, OBJECT_BYTES)
    return target


def decrypted(
    form: EncryptedForm, stored: bytearray, number: int = 2, object_bytes: int = OBJECT_BYTES
) -> bytes | None:
    target = bytearray(len(stored) - 28)
    is_right = form.decrypt(memoryview(stored), memoryview(target), number, object_bytes)
    return bytes(target) if is_right else None


def test_every_flipped_byte_is_found() -> None:
    form, stored = form_of(), encrypted(form_of())
    for at in (*range(50), *random.Random(2).sample(range(len(stored)), 200), len(stored) - 1):
        stored[at] ^= 1 << at % 8
        assert decrypted(form, stored) is None, at
        stored[at] ^= 1 << at % 8
    assert decrypted(form, stored) == DATA


def test_a_segment_in_another_place_or_of_another_length_does_not_decrypt() -> None:
    form, stored = form_of(), encrypted(form_of())
    assert decrypted(form, stored, number=1) is None
    assert decrypted(form, stored, object_bytes=2 * SEGMENT_BYTES + 5001) is None
    assert decrypted(form, stored[:-1]) is None
    assert decrypted(form_of(master=OTHER), stored) is None


def test_nonces_are_random_and_never_given_twice() -> None:
    form = form_of()
    stored = [bytes(encrypted(form)) for _ in range(1000)]
    assert len({it[:12] for it in stored}) == len({it[12:] for it in stored}) == 1000
    ones = Counter(byte & 1 for it in stored for byte in it[:12])
    assert 5500 < ones[1] < 6500  # 12,000 bits: 9 standard deviations


def test_names_reveal_neither_hash_nor_key() -> None:
    form = form_of()
    assert ADDRESS.key.block_hash.hex() not in form.key
    address = keys.parse(form.key)
    assert address.is_encrypted
    assert address.namespace == NAMESPACE
    for shown in (repr(MasterKey(MASTER)), str(form), repr(Keyring([MASTER]))):
        assert MASTER.hex() not in shown
        assert repr(MASTER) not in shown


def test_the_header_is_one_of_safetensors() -> None:
    form = form_of()
    stored = form.header(700) + bytes(728)
    assert len(form.header(700)) == HEADER_BYTES
    assert [*safetensors.torch.load(stored)] == ["encrypted"]
    metadata = json.loads(stored[8:HEADER_BYTES])["__metadata__"]
    assert metadata == {"s3kv.encrypted": "aes-256-gcm", "s3kv.key": MasterKey(MASTER).id}
    assert len(form.header(5 * 2**40)) == HEADER_BYTES


@given(st.one_of(st.integers(1, 5000), st.integers(1, 2**41)))
def test_lengths_are_those_of_one_object(nbytes: int) -> None:
    assert decrypted_bytes(encrypted_bytes(nbytes)) == nbytes


@pytest.mark.parametrize("around", [0, SEGMENT_BYTES, 2 * SEGMENT_BYTES])
def test_no_other_length_is_one(around: int) -> None:
    """Every length near a boundary of segments either is one object's or none's."""
    lengths = {encrypted_bytes(n): n for n in range(max(1, around - 100), around + 100)}
    for nbytes in range(min(lengths) - 60, max(lengths)):
        plain = decrypted_bytes(nbytes)
        assert plain == lengths.get(nbytes) or (plain is not None and plain < min(lengths.values()))


def test_ranges_are_those_of_whole_segments() -> None:
    size, extra = SEGMENT_BYTES, 28
    assert encrypted_range(range(2 * size)) == range(HEADER_BYTES + 2 * (size + extra))
    begin = HEADER_BYTES + size + extra
    assert encrypted_range(range(size, size + 9)) == range(begin, begin + 9 + extra)
    assert [*segments_in(range(size, 2 * size + 9))] == [
        (1, range(size), range(size + extra)),
        (2, range(size, size + 9), range(size + extra, size + 9 + 2 * extra)),
    ]
    number, inside, stored = next(segments_in(range(9)))
    assert (number, inside, stored) == (0, range(9), range(HEADER_BYTES, HEADER_BYTES + 9 + extra))
    with pytest.raises(AssertionError):
        encrypted_range(range(1, 9))


def test_a_keyring_knows_the_objects_of_all_its_keys() -> None:
    ring = Keyring([MASTER, OTHER])
    assert [form.key for form in ring.forms(KEY)] == [form_of().key, form_of(master=OTHER).key]
    assert ring.forms(KEY) is ring.forms(KEY)
    for other in (NAMESPACE.manifest, NAMESPACE.shape("whole"), form_of().key, "else/where"):
        assert ring.forms(other) == ()


@pytest.mark.parametrize("secrets", [[], [MASTER, OTHER, MASTER], [MASTER[:31]], [b""]])
def test_other_keys_are_refused(secrets: list[bytes]) -> None:
    with pytest.raises(ValueError, match="key"):
        Keyring(secrets)


@pytest.mark.parametrize("missing", ["package", "method"])
def test_without_the_package_the_error_names_it(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if missing == "package":
        monkeypatch.setitem(sys.modules, "cryptography.exceptions", None)
    else:
        aead: Any = importlib.import_module("cryptography.hazmat.primitives.ciphers.aead")
        monkeypatch.setattr(aead, "AESGCM", object)
    encryption._cryptography.cache_clear()
    with pytest.raises(ConfigError, match=r"cryptography, 47 or later.*vllm-s3kv\[encryption\]"):
        Keyring([MASTER])
    monkeypatch.undo()
    encryption._cryptography.cache_clear()
    Keyring([MASTER])


def test_the_speeds_are_those_of_the_fastest_segment() -> None:
    times_s = iter([0.0, 2.0, 10.0, 11.0, 20.0, 23.0, 30.0, 34.0, 40.0, 44.0, 50.0, 52.0])
    assert encryption.speeds(lambda: next(times_s)) == (SEGMENT_BYTES, SEGMENT_BYTES / 2)
    assert min(encryption.speeds(lambda: 1.0)) > 0
