"""Compressed segments with the right digest and the right header, and any bytes behind it: made by
somebody who may write to the bucket, where digests need no key. `python -m tests.system.fuzz.chunks
SEED COUNT` decodes so many. Run in a process of its own: what decodes them is not in Python.
"""

from __future__ import annotations

import collections
import json
import random
import sys
from itertools import accumulate, pairwise

import xxhash

from s3kv.objects import compression
from s3kv.objects.envelope import Segments
from tests.system.fuzz.targets import ENVELOPES, GOOD, HASH, Wrong, edited, refusal_of

ENVELOPE = ENVELOPES[0]
HEADER_BYTES = 32


def pieces() -> list[bytes]:
    """The stored segments of the good object."""
    data = GOOD[ENVELOPE]
    listed = ENVELOPE.listed(data[: ENVELOPE.header_bytes], HASH, len(data))
    if listed is None:
        raise Wrong("the good object is none")
    bounds = accumulate(listed.lengths, initial=ENVELOPE.header_bytes)
    return [data[at:to] for at, to in pairwise(bounds)]


PIECES = pieces()


def chunks(data: bytes) -> str | None:
    """One segment of the object with another body: the first byte says which, the second how much
    of its end is cut off, and the others change it. Returns the reason of the refusal."""
    number = data[0] % len(PIECES) if data else 0
    cut = data[1] if len(data) > 1 else 0
    body = edited(PIECES[number][HEADER_BYTES:], data[2:])
    body = body[: len(body) - cut * (cut < 64)]
    segment, size = ENVELOPE.segments[number], ENVELOPE.item_bytes[number]
    stored_bytes = min(HEADER_BYTES + len(body), len(segment) - 1)
    header = compression._header(len(segment), stored_bytes, size)
    changed = [*PIECES]
    changed[number] = (header + body)[:stored_bytes]
    decoded = [_decoded(n, piece) for n, piece in enumerate(changed)]
    segments = Segments([len(piece) for piece in changed], decoded)
    covered = ENVELOPE.header(HASH, segments)
    digests = [
        ENVELOPE.chunk.integrity.digest(covered, n, memoryview(piece)).encode()
        for n, piece in enumerate(changed)
    ]
    header = ENVELOPE.header(HASH, segments._replace(digests=digests))
    refusal = refusal_of(ENVELOPE, header + b"".join(changed))
    if refusal not in (None, "digest"):
        raise Wrong(f"a segment that does not decode is called {refusal}")
    return refusal


def _decoded(number: int, piece: bytes) -> bytes:
    """The digest of what a stored segment decodes to, if it does."""
    target = bytearray(len(ENVELOPE.segments[number]))
    codec = compression.codec()
    if codec is None:
        raise Wrong("blosc2 is missing")
    if len(piece) == len(target):
        target[:] = piece
    else:
        codec.decode(memoryview(piece), memoryview(target), ENVELOPE.item_bytes[number])
    return xxhash.xxh3_64_hexdigest(target).encode()


NUMBERS = (-(2**31), -1000, -257, -256, -255, -2, -1, 0, 1, 4, 31, 32, 36, 255, 2**16, 2**31 - 1)
"""For lengths and offsets: the first is a run of bytes where it is negative."""


def change(rng: random.Random) -> bytes:
    """Input of `chunks`, most of which changes lengths and offsets at the front."""
    data = bytes([rng.randrange(256), rng.choice([0, 0, 0, rng.randrange(64)])])
    for _ in range(rng.randint(1, 3)):
        at = rng.choice([0, 4, 8 + rng.randrange(16), rng.randrange(2**16)])
        piece = rng.choice(NUMBERS).to_bytes(4, "little", signed=True)
        if rng.random() < 0.3:
            piece = rng.randbytes(rng.randint(1, 8))
        data += at.to_bytes(2, "little") + bytes([len(piece)]) + piece
    return data


if __name__ == "__main__":
    rng, seen = random.Random(int(sys.argv[1])), collections.Counter[str]()
    for _ in range(int(sys.argv[2])):
        data = change(rng)
        print(data.hex(), flush=True)
        seen["refused" if chunks(data) else "decoded"] += 1
    print(json.dumps(seen))
