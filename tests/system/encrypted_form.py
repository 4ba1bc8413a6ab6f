"""Encrypted objects by the rules of the format alone, with nothing of the code under test."""

from __future__ import annotations

import hmac
import json
import random

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

_HEADER_BYTES, _NONCE_BYTES, _EXTRA_BYTES = 256, 12, 28


def encrypted_key(key: str, secret: bytes) -> str:
    *root, digest, _, block_hash, name = key.split("/")
    said = f"{digest} ".encode() + bytes.fromhex(block_hash)
    mark = hmac.digest(_derived(secret, b"names"), said, "sha256").hex()
    name = name.removesuffix(".safetensors")
    return "/".join([*root, digest, mark[:2], mark, f"{name}.encrypted.safetensors"])


def encrypted_bytes(nbytes: int, segment_bytes: int) -> int:
    return _HEADER_BYTES + nbytes + _EXTRA_BYTES * -(-nbytes // segment_bytes)


def encrypted(key: str, secret: bytes, data: bytes, segment_bytes: int) -> bytes:
    cipher, parts = _cipher(key, secret), []
    for number, at in enumerate(range(0, len(data), segment_bytes)):
        nonce = random.Random(f"{key} {number}").randbytes(_NONCE_BYTES)
        piece = data[at : at + segment_bytes]
        parts.append(nonce + cipher.encrypt(nonce, piece, _associated(number, len(data))))
    return _header(secret, sum(map(len, parts))) + b"".join(parts)


def decrypted(key: str, secret: bytes, data: bytes, segment_bytes: int) -> bytes | None:
    size, stored = segment_bytes + _EXTRA_BYTES, data[_HEADER_BYTES:]
    pieces = [stored[at : at + size] for at in range(0, len(stored), size)]
    nbytes = len(stored) - _EXTRA_BYTES * len(pieces)
    if not pieces or data[:_HEADER_BYTES] != _header(secret, len(stored)):
        return None
    cipher = _cipher(key, secret)
    try:
        return b"".join(
            cipher.decrypt(piece[:_NONCE_BYTES], piece[_NONCE_BYTES:], _associated(number, nbytes))
            for number, piece in enumerate(pieces)
        )
    except InvalidTag:
        return None


def _derived(secret: bytes, use: bytes) -> bytes:
    return HKDF(hashes.SHA256(), 32, salt=None, info=b"s3kv 2026-11 " + use).derive(secret)


def _cipher(key: str, secret: bytes) -> AESGCM:
    *_, digest, _, block_hash, name = key.split("/")
    coverage, _, shard = name.removesuffix(".safetensors").removeprefix("g").partition("-")
    identity = f"object {digest} {coverage} {shard} ".encode() + bytes.fromhex(block_hash)
    return AESGCM(_derived(secret, identity))


def _associated(number: int, nbytes: int) -> bytes:
    return number.to_bytes(8, "little") + nbytes.to_bytes(8, "little")


def _header(secret: bytes, stored_bytes: int) -> bytes:
    master = _derived(secret, b"id of a master key")[:4].hex()
    text = json.dumps(
        {
            "__metadata__": {"s3kv.encrypted": "aes-256-gcm", "s3kv.key": master},
            "encrypted": {
                "dtype": "U8",
                "shape": [stored_bytes],
                "data_offsets": [0, stored_bytes],
            },
        },
        separators=(",", ":"),
    )
    return (_HEADER_BYTES - 8).to_bytes(8, "little") + text.encode().ljust(_HEADER_BYTES - 8)
