"""What each mode of `integrity` lets pass, and what it must not."""

from __future__ import annotations

import dataclasses
import importlib
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import xxhash

from s3kv.config import SECRET_VARIABLE, Config
from s3kv.errors import ConfigError
from s3kv.objects.codec import ChunkFormat
from s3kv.objects.headers import read_header
from s3kv.objects.integrity import XXH3, Integrity
from s3kv.types import TensorSpec
from tests.unit.objects.test_codec import HASH, check, sealed
from tests.unit.stores.suite import pattern

SECRET = "correct horse battery staple"
KEYED = Integrity("blake3-keyed", bytes(range(32)))
NONE = Integrity("none")
PLAIN = ChunkFormat(
    "0123456789abcdef" * 2, (TensorSpec("kv", "U8", (5000,)),), 0, "h0-7of8-l0-31of32"
)


def of(integrity: Integrity, **changes: Any) -> ChunkFormat:
    return dataclasses.replace(PLAIN, integrity=integrity, **changes)


def test_no_mode_takes_an_object_of_another() -> None:
    for one in (XXH3, KEYED, NONE):
        for other in (XXH3, KEYED, NONE):
            if one is not other:
                assert check(sealed(of(other)), of(one)) == "algorithm"


def test_without_a_digest_the_payload_is_believed_and_nothing_else() -> None:
    chunk = of(NONE)
    buffer = sealed(chunk)
    buffer[-1] ^= 1
    assert check(buffer, chunk) is None
    assert check(buffer[:-1], chunk) == "length"
    assert check(buffer, chunk, b"other") == "block_hash"
    buffer[100] ^= 1
    assert check(buffer, chunk) is not None


def forged_payload(good: bytes) -> bytes:
    """Other bytes, and the digest anybody can compute."""
    payload = bytes(pattern(PLAIN.payload_bytes, 2))
    (old,) = read_header(memoryview(good)).digests
    new = xxhash.xxh3_128_hexdigest(payload).ljust(len(old), "0")[: len(old)]
    return good[: PLAIN.header_bytes].replace(old.encode(), new.encode()) + payload


def renamed(old: str, new: str, **changes: Any) -> bytes:
    """A good object of another kind, with the header changed to say what is wanted."""
    data = bytes(sealed(of(KEYED, **changes), seed=2))
    head = data[: PLAIN.header_bytes].rstrip().replace(old.encode(), new.encode())
    return head.ljust(PLAIN.header_bytes) + data[PLAIN.header_bytes :]


OTHER = bytes(sealed(of(KEYED), block_hash=b"\x01" * 32, seed=2))
"""A good object of another chunk."""
FORGERIES: dict[str, Callable[[bytes], bytes]] = {
    "payload": forged_payload,
    "another key": lambda _: bytes(sealed(of(Integrity("blake3-keyed", bytes(32))), seed=2)),
    "without a key": lambda _: bytes(sealed(of(XXH3), seed=2)),
    "without a digest": lambda _: bytes(sealed(of(NONE), seed=2)),
    "another chunk": lambda _: OTHER,
    "another chunk, renamed": lambda _: OTHER.replace(b"01" * 32, HASH.hex().encode()),
    "namespace": lambda _: renamed("f" * 32, PLAIN.namespace_digest, namespace_digest="f" * 32),
    "shard": lambda _: renamed("h0-3of8-l0-31of32", PLAIN.shard, shard="h0-3of8-l0-31of32"),
    "coverage": lambda _: renamed('coverage":"1"', 'coverage":"0"', coverage=1),
    "tensors": lambda _: renamed(
        "[2,2500]", "[5000]", tensors=(TensorSpec("kv", "U8", (2, 2500)),)
    ),
    "spliced": lambda good: good[: PLAIN.header_bytes] + OTHER[PLAIN.header_bytes :],
}


@pytest.mark.parametrize("forge", FORGERIES.values(), ids=FORGERIES)
def test_whoever_may_write_cannot_forge_without_the_key(forge: Callable[[bytes], bytes]) -> None:
    """They know the format, every object in the bucket, and which object will be asked for."""
    chunk = of(KEYED)
    data = forge(bytes(sealed(chunk)))
    assert len(data) == chunk.object_bytes
    assert check(data, chunk) is not None


def configured(**settings: Any) -> Config:
    return Config(bucket="kv-cache", integrity="blake3-keyed", **settings)


def test_a_secret_from_file_or_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secret").write_text(SECRET + "\n")
    from_file = Integrity.of(configured(integrity_secret_file=str(tmp_path / "secret")))
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    assert from_file == Integrity.of(configured())
    assert len(from_file.key) == 32
    monkeypatch.setenv(SECRET_VARIABLE, SECRET + "!")
    assert Integrity.of(configured()) != from_file
    assert Integrity.of(configured()).identity() != from_file.identity()


def test_the_secret_is_told_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    config = configured()
    integrity = Integrity.of(config)
    said = [repr(config), repr(integrity), str(integrity.identity()), repr(of(integrity))]
    said.append(bytes(sealed(of(integrity))[: of(integrity).header_bytes]).decode("latin-1"))
    for text in said:
        assert SECRET not in text
        assert integrity.key.hex() not in text
        assert repr(integrity.key) not in text
    assert SECRET.encode() not in pickle.dumps(integrity)
    assert SECRET.encode() not in msgspec.msgpack.encode(config)


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        (None, None, [SECRET_VARIABLE, "0 bytes", "16 random bytes"]),
        ("secret", "too short", ["integrity_secret_file", "9 bytes", "16 random bytes"]),
        ("missing", None, ["integrity_secret_file", "missing", "No such file"]),
    ],
)
def test_no_secret_no_start(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    file: str | None,
    content: str | None,
    words: list[str],
) -> None:
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    if file is not None and content is not None:
        (tmp_path / file).write_text(content)
    path = None if file is None else str(tmp_path / file)
    with pytest.raises(ConfigError) as caught:
        Integrity.of(configured(integrity_secret_file=path))
    for word in words:
        assert word in str(caught.value)
    assert content is None or content not in str(caught.value)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)

    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ConfigError, match=r"blake3: pip install 'vllm-s3kv\[integrity\]'"):
        Integrity.of(configured())
    assert Integrity.of(Config(bucket="kv-cache")) == XXH3
