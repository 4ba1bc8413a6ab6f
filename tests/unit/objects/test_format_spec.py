"""docs/object-format.md, carried out by a program that was written from it alone.

Above the line nothing of s3kv is used. Below it, the two have to agree byte by byte.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import random
import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import Any, NamedTuple

import blake3
import blosc2
import pytest
import xxhash
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

SECRET = b"an example of a secret"
SIZES = {"BF16": 2, "F32": 4, "U8": 1, "F8_E4M3": 1}
SEGMENT_BYTES = 8_388_608
COMPRESSED_SEGMENT_BYTES = ENCRYPTED_SEGMENT_BYTES = 1_048_576


class Layer(NamedTuple):
    name: str
    dtype: str
    page: tuple[int, ...]
    order: str


class Tensor(NamedTuple):
    name: str
    dtype: str
    shape: tuple[int, ...]
    layers: tuple[Layer, ...] = ()

    @property
    def nbytes(self) -> int:
        count = SIZES[self.dtype]
        for size in self.shape:
            count *= size
        return count


class Expected(NamedTuple):
    """What a reader knows before it reads (6, and 9 but for the master key)."""

    prefix: str
    namespace: str
    coverage: int
    shard: str
    block_hash: bytes
    first_block: int
    blocks: int
    tensors: tuple[Tensor, ...]
    algorithm: str


def name_of(what: Expected) -> str:
    name = what.block_hash.hex()
    place = f"{what.prefix}/v3/{what.namespace}/{name[:2]}/{name}"
    return f"{place}/g{what.coverage}-{what.shard}.safetensors"


def namespace_of(fingerprint: dict[str, Any]) -> tuple[str, bytes]:
    """The namespace, and its manifest (2)."""
    canonical = json.dumps(
        fingerprint, sort_keys=True, separators=(",", ":"), allow_nan=False
    ).encode("ascii")
    return hashlib.sha256(canonical).hexdigest()[:32], canonical


def segments_of(what: Expected, segment_bytes: int = SEGMENT_BYTES) -> list[list[tuple[int, int]]]:
    """By part, the begin and end of its segments in the payload (3)."""
    parts = []
    begin = 0
    for tensor in what.tensors:
        end = begin + tensor.nbytes
        parts.append(list(pairwise([*range(begin, end, segment_bytes), end])))
        begin = end
    return parts


def metadata_of(what: Expected, block_hash: str) -> dict[str, str]:
    layers = {
        t.name: [[n, d, list(p), o] for n, d, p, o in t.layers] for t in what.tensors if t.layers
    }
    return {
        "s3kv.format": "3",
        "s3kv.namespace": what.namespace,
        "s3kv.coverage": str(what.coverage),
        "s3kv.shard": what.shard,
        "s3kv.block_hash": block_hash,
        "s3kv.first_block": str(what.first_block),
        "s3kv.blocks": str(what.blocks),
        "s3kv.layers": json.dumps(layers, separators=(",", ":")),
        "s3kv.algorithm": what.algorithm,
    }


def entries_of(what: Expected) -> dict[str, Any]:
    members: dict[str, Any] = {}
    begin = 0
    for tensor in what.tensors:
        end = begin + tensor.nbytes
        members[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    return members


def text_of(what: Expected, block_hash: str, digests: list[str]) -> str:
    metadata = metadata_of(what, block_hash) | {"s3kv.digests": ",".join(digests)}
    return json.dumps({"__metadata__": metadata} | entries_of(what), separators=(",", ":"))


def header_of(what: Expected, digests: list[str]) -> bytes:
    digits = {"xxh3-128": 32, "blake3-keyed": 64, "none": 0}[what.algorithm]
    count = sum(len(part) for part in segments_of(what)) if digits else 0
    longest = text_of(what, "0" * 128, ["0" * digits] * count)
    return padded(text_of(what, what.block_hash.hex(), digests), 8 + len(longest))


def padded(text: str, longest: int) -> bytes:
    total = (longest + 4095) // 4096 * 4096
    data = text.encode("ascii")
    return (total - 8).to_bytes(8, "little") + data + b" " * (total - 8 - len(data))


def digest_of(what: Expected, number: int, segment: bytes, header: bytes = b"") -> str:
    if what.algorithm == "xxh3-128":
        return xxhash.xxh3_128(segment, seed=0).hexdigest()
    covered = (header or header_of(what, [])) + number.to_bytes(8, "little") + segment
    return str(blake3.blake3(covered, key=key()).hexdigest())


def digests_of(what: Expected, payload: bytes) -> list[str]:
    if what.algorithm == "none":
        return []
    cuts = [cut for part in segments_of(what) for cut in part]
    return [digest_of(what, n, payload[begin:end]) for n, (begin, end) in enumerate(cuts)]


def key() -> bytes:
    context = "s3kv 2026-11 chunk integrity key"
    return bytes(blake3.blake3(SECRET, derive_key_context=context).digest())


def key_id() -> str:
    return str(blake3.blake3(b"s3kv key id", key=key()).hexdigest()[:16])


def write(what: Expected, payload: bytes) -> bytes:
    return header_of(what, digests_of(what, payload)) + payload


def accepts(what: Expected, data: bytes) -> bool:
    header_bytes = len(header_of(what, []))
    if len(data) != header_bytes + sum(t.nbytes for t in what.tensors):
        return False
    return data[:header_bytes] == header_of(what, digests_of(what, data[header_bytes:]))


# 5. Compressed objects


def compressed_segments_of(what: Expected) -> list[tuple[int, int, int]]:
    """Begin, end and item size of every segment."""
    return [
        (begin, end, max(SIZES[dtype] for dtype in (part.dtype, *(x.dtype for x in part.layers))))
        for part, cuts in zip(
            what.tensors, segments_of(what, COMPRESSED_SEGMENT_BYTES), strict=True
        )
        for begin, end in cuts
    ]


def may_be_compressed(what: Expected) -> bool:
    return sum(t.nbytes for t in what.tensors) >= 256 * 1024 and what.algorithm != "none"


def compressed_text_of(
    what: Expected,
    block_hash: str,
    lengths: list[int],
    decoded: list[str],
    digests: list[str],
    total: str,
) -> str:
    metadata = metadata_of(what, block_hash) | {
        "s3kv.codec": "blosc2",
        "s3kv.tensors": json.dumps(entries_of(what), separators=(",", ":")),
        "s3kv.stored": ",".join(f"{length:06x}" for length in lengths),
        "s3kv.decoded": ",".join(decoded),
        "s3kv.digests": ",".join(digests),
    }
    text = json.dumps({"__metadata__": metadata}, separators=(",", ":"))
    entry = f'{{"dtype":"U8","shape":[{total}],"data_offsets":[0,{total}]}}'
    return f'{text[:-1]},"segments":{entry}}}'


def compressed_header_of(
    what: Expected, lengths: list[int], decoded: list[str], digests: list[str], padding: int = 0
) -> bytes:
    count = len(compressed_segments_of(what))
    digits = {"xxh3-128": 32, "blake3-keyed": 64}[what.algorithm]
    most = str(sum(t.nbytes for t in what.tensors))
    lists = [0] * count, ["0" * 16] * count, ["0" * digits] * count
    longest = compressed_text_of(what, "0" * 128, *lists, most)
    total = str(sum(lengths) + padding)
    text = compressed_text_of(what, what.block_hash.hex(), lengths, decoded, digests, total)
    return padded(text, 8 + len(longest))


def blosc2_header(nbytes: int, stored_bytes: int, item_bytes: int) -> bytes:
    sizes = b"".join(n.to_bytes(4, "little") for n in (nbytes, nbytes, stored_bytes))
    return bytes([5, 1, 0x85, item_bytes]) + sizes + bytes([1, 0, 0, 0, 0, 0, 5]) + bytes(9)


def stored(segment: bytes, item_bytes: int) -> bytes:
    nbytes = len(segment)
    settings = {"codec": blosc2.Codec.ZSTD, "clevel": 1, "nthreads": 1}
    settings |= {"filters": [blosc2.Filter.SHUFFLE], "filters_meta": [0]}
    data: bytes = blosc2.compress2(segment, typesize=item_bytes, blocksize=nbytes, **settings)
    is_usual = data[:32] == blosc2_header(nbytes, len(data), item_bytes)
    return data if is_usual and len(data) < nbytes and not nbytes % item_bytes else segment


def padding_of(what: Expected, stored_bytes: int) -> int:
    unit = (sum(t.nbytes for t in what.tensors) + 63) // 64
    return (unit - stored_bytes % unit) % unit


def write_compressed(what: Expected, payload: bytes, *, is_padded: bool = False) -> bytes:
    pieces = [stored(payload[begin:end], t) for begin, end, t in compressed_segments_of(what)]
    lengths = [len(piece) for piece in pieces]
    cuts = compressed_segments_of(what)
    decoded = [xxhash.xxh3_64_hexdigest(payload[begin:end]) for begin, end, _ in cuts]
    padding = padding_of(what, sum(lengths)) if is_padded else 0
    covered = compressed_header_of(what, lengths, decoded, [], padding)
    digests = [digest_of(what, n, piece, covered) for n, piece in enumerate(pieces)]
    header = compressed_header_of(what, lengths, decoded, digests, padding)
    return header + bytes(padding) + b"".join(pieces)


def read(what: Expected, data: bytes) -> bytes | None:
    """The payload of an object of either form; None if it is refused (6)."""
    plain_bytes = len(header_of(what, [])) + sum(t.nbytes for t in what.tensors)
    if len(data) == plain_bytes:
        return data[len(header_of(what, [])) :] if accepts(what, data) else None
    if len(data) > plain_bytes or not may_be_compressed(what):
        return None
    segments = compressed_segments_of(what)
    header_bytes = len(compressed_header_of(what, [0] * len(segments), [], []))
    pattern = ",".join(f'"s3kv.{name}":"([0-9a-f,]+)"' for name in ("stored", "decoded", "digests"))
    found = re.search(pattern.encode(), data)
    if found is None:
        return None
    lengths = [int(length, 16) for length in found[1].split(b",")]
    decoded, digests = (found[number].decode().split(",") for number in (2, 3))
    padding = len(data) - header_bytes - sum(lengths)
    if len(lengths) != len(segments) or padding not in (0, padding_of(what, sum(lengths))):
        return None
    if data[:header_bytes] != compressed_header_of(what, lengths, decoded, digests, padding):
        return None
    covered = compressed_header_of(what, lengths, decoded, [], padding)
    payload = b""
    cuts = pairwise(accumulate(lengths, initial=header_bytes + padding))
    for number, ((begin, end, t), (at, to)) in enumerate(zip(segments, cuts, strict=True)):
        piece, nbytes = data[at:to], end - begin
        if not 1 <= len(piece) <= nbytes:
            return None
        if digest_of(what, number, piece, covered) != digests[number]:
            return None
        if len(piece) < nbytes:
            if nbytes % t or piece[:32] != blosc2_header(nbytes, len(piece), t):
                return None
            piece = bytes(blosc2.decompress2(piece))
        if xxhash.xxh3_64_hexdigest(piece) != decoded[number]:
            return None
        payload += piece
    return payload


# 9. Encrypted objects


def derived(master: bytes, use: bytes) -> bytes:
    return HKDF(SHA256(), 32, salt=None, info=b"s3kv 2026-11 " + use).derive(master)


def encrypted_name_of(what: Expected, master: bytes) -> str:
    said = what.namespace.encode() + b" " + what.block_hash
    name = hmac.new(derived(master, b"names"), said, "sha256").hexdigest()
    place = f"{what.prefix}/v3/{what.namespace}/{name[:2]}/{name}"
    return f"{place}/g{what.coverage}-{what.shard}.encrypted.safetensors"


def cipher_of(what: Expected, master: bytes) -> AESGCM:
    place = f"object {what.namespace} {what.coverage} {what.shard} "
    return AESGCM(derived(master, place.encode() + what.block_hash))


def encrypted_header_of(master: bytes, stored_bytes: int) -> bytes:
    key_id = derived(master, b"id of a master key")[:4].hex()
    metadata = f'{{"s3kv.encrypted":"aes-256-gcm","s3kv.key":"{key_id}"}}'
    entry = f'{{"dtype":"U8","shape":[{stored_bytes}],"data_offsets":[0,{stored_bytes}]}}'
    text = f'{{"__metadata__":{metadata},"encrypted":{entry}}}'.encode("ascii")
    return (248).to_bytes(8, "little") + text + b" " * (248 - len(text))


def said_of(number: int, nbytes: int) -> bytes:
    return number.to_bytes(8, "little") + nbytes.to_bytes(8, "little")


def write_encrypted(
    what: Expected, master: bytes, data: bytes, nonce: Callable[[int], bytes]
) -> bytes:
    """The encrypted object around an object. nonce: by the segment's number."""
    cipher, stored = cipher_of(what, master), b""
    for number, begin in enumerate(range(0, len(data), ENCRYPTED_SEGMENT_BYTES)):
        segment, drawn = data[begin : begin + ENCRYPTED_SEGMENT_BYTES], nonce(number)
        stored += drawn + cipher.encrypt(drawn, segment, said_of(number, len(data)))
    return encrypted_header_of(master, len(stored)) + stored


def decrypt(what: Expected, master: bytes, data: bytes) -> bytes | None:
    """The object inside; None if there is none (9)."""
    stored_bytes, step = len(data) - 256, ENCRYPTED_SEGMENT_BYTES + 28
    count = (stored_bytes + step - 1) // step
    nbytes = stored_bytes - 28 * count
    if nbytes <= (count - 1) * ENCRYPTED_SEGMENT_BYTES or count < 1:
        return None
    if data[:256] != encrypted_header_of(master, stored_bytes):
        return None
    cipher, plain = cipher_of(what, master), b""
    for number in range(count):
        piece = data[256 + number * step : 256 + (number + 1) * step]
        try:
            plain += cipher.decrypt(piece[:12], piece[12:], said_of(number, nbytes))
        except InvalidTag:
            return None
    return plain


def read_encrypted(what: Expected, master: bytes, data: bytes) -> bytes | None:
    inside = decrypt(what, master, data)
    return None if inside is None else read(what, inside)


# ------------------------------------------------------------------------------------------------
from s3kv.config import SECRET_VARIABLE, Config  # noqa: E402
from s3kv.objects import encryption  # noqa: E402
from s3kv.objects.codec import ChunkFormat  # noqa: E402
from s3kv.objects.encryption import EncryptedForm, Keyring, MasterKey  # noqa: E402
from s3kv.objects.envelope import Envelope  # noqa: E402
from s3kv.objects.integrity import Integrity  # noqa: E402
from s3kv.objects.keys import Namespace, canonical_json, fingerprint_digest  # noqa: E402
from s3kv.place import Place  # noqa: E402
from s3kv.types import ChunkKey, TensorSpec  # noqa: E402
from scripts import format_example  # noqa: E402
from tests.project import ROOT  # noqa: E402
from tests.system.forms import compressed, opened  # noqa: E402

MODES = {"xxh3": "xxh3-128", "blake3-keyed": "blake3-keyed", "none": "none"}
SHARD = "h4-7of8-l0-31of32"
PAGE = (8, 16, 64)
TENSORS = (
    Tensor(
        "g0",
        "BF16",
        (4, 2, *PAGE),
        tuple(Layer(f"model.layers.{n}.self_attn.attn", "BF16", PAGE, "HNC") for n in range(2)),
    ),
    Tensor(
        "g1",
        "U8",
        (4, 140),
        (Layer("naïve", "F32", (3,), "C"), Layer("other", "F8_E4M3", (8, 16), "")),
    ),
    Tensor("large", "U8", (2 * SEGMENT_BYTES + 3,)),
    Tensor("rest", "U8", ()),
)


def spec_of(layer: Layer) -> TensorSpec:
    return TensorSpec(layer.name, layer.dtype, layer.page, (), layer.order)


def specs_of(tensors: tuple[Tensor, ...]) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(t.name, t.dtype, t.shape, tuple(spec_of(layer) for layer in t.layers))
        for t in tensors
    )


@pytest.fixture(params=MODES)
def pair(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> tuple[Expected, ChunkFormat]:
    """The same object as the page and as s3kv have it."""
    monkeypatch.setenv(SECRET_VARIABLE, SECRET.decode())
    mode = request.param
    integrity = Integrity.of(Config(bucket="b2", integrity=mode))
    digest = "0123456789abcdef" * 2
    ours = ChunkFormat(digest, specs_of(TENSORS), 0, SHARD, integrity, 3)
    block_hash = bytes(range(7, 39))
    theirs = Expected("team/s3kv", digest, 0, SHARD, block_hash, 3, 4, TENSORS, MODES[mode])
    return theirs, ours


def payload_of(what: Expected) -> bytes:
    nbytes = sum(t.nbytes for t in what.tensors)
    return (bytes(i * 7 % 251 for i in range(251)) * (nbytes // 251 + 1))[:nbytes]


def sealed(ours: ChunkFormat, block_hash: bytes, payload: bytes) -> bytes:
    buffer = memoryview(bytearray(ours.object_bytes))
    buffer[ours.header_bytes :] = payload
    ours.seal(Place.of(buffer, ours.header_bytes), block_hash)
    return bytes(buffer)


def test_both_write_the_same_bytes(pair: tuple[Expected, ChunkFormat]) -> None:
    """They are on buckets. A change needs a new format version."""
    theirs, ours = pair
    payload = payload_of(theirs)
    assert write(theirs, payload) == sealed(ours, theirs.block_hash, payload)


def test_both_refuse_the_same(pair: tuple[Expected, ChunkFormat]) -> None:
    theirs, ours = pair
    good = write(theirs, payload_of(theirs))
    other = write(theirs._replace(block_hash=b"another"), payload_of(theirs))
    window = write(theirs._replace(first_block=2), payload_of(theirs))
    flipped = bytearray(good)
    flipped[len(good) // 2] ^= 1
    for data in (good, other, window, bytes(flipped), good[:-1], good + b"\0"):
        refused = (
            ours.check(Place.of(data, ours.header_bytes), len(data), theirs.block_hash) is not None
        )
        assert refused == (not accepts(theirs, data))
    assert accepts(theirs, good)
    assert not accepts(theirs, other)


def varied_payload_of(what: Expected) -> bytes:
    """With noise, so that some segments shrink and others do not."""
    rng = random.Random(11)
    data = bytearray(payload_of(what))
    for begin in (0, 140_000, 3 * COMPRESSED_SEGMENT_BYTES):
        noise = rng.randbytes(2 * COMPRESSED_SEGMENT_BYTES)
        data[begin : begin + len(noise)] = noise[: len(data) - begin]
    return bytes(data)


def decoded(ours: ChunkFormat, block_hash: bytes, data: bytes) -> bytes | None:
    assert len(data) < ours.object_bytes, "it is no compressed one"
    reason, place = opened(ours, data, block_hash)
    return None if reason else bytes(place.payload)


def test_both_write_the_same_compressed_bytes(pair: tuple[Expected, ChunkFormat]) -> None:
    theirs, ours = pair
    assert may_be_compressed(theirs) == (Envelope.of(ours) is not None)
    if not may_be_compressed(theirs):
        return
    for payload in (payload_of(theirs), varied_payload_of(theirs)):
        data, plain = write_compressed(theirs, payload), write(theirs, payload)
        assert data == compressed(ours, plain, theirs.block_hash)
        assert len(data) < ours.object_bytes
        assert read(theirs, data) == payload == decoded(ours, theirs.block_hash, data)
        assert read(theirs, plain) == payload


def test_both_refuse_the_same_compressed_objects(pair: tuple[Expected, ChunkFormat]) -> None:
    theirs, ours = pair
    if not may_be_compressed(theirs):
        return
    payload = varied_payload_of(theirs)
    good = write_compressed(theirs, payload)
    other = write_compressed(theirs._replace(block_hash=b"another" * 4 + b"hash"), payload)
    flipped = bytearray(good)
    flipped[len(good) // 2] ^= 1
    for data in (other, bytes(flipped), good[:-1], good + b"\0", good[:100]):
        assert read(theirs, data) is None
        assert decoded(ours, theirs.block_hash, data) is None


def test_both_write_and_read_the_same_padded_objects(pair: tuple[Expected, ChunkFormat]) -> None:
    theirs, ours = pair
    if not may_be_compressed(theirs):
        return
    unit = (ours.payload_bytes + 63) // 64
    for payload in (payload_of(theirs), varied_payload_of(theirs)):
        plain = write_compressed(theirs, payload)
        data = write_compressed(theirs, payload, is_padded=True)
        assert data == compressed(ours, write(theirs, payload), theirs.block_hash, is_padded=True)
        assert len(data) > len(plain)
        header_bytes = 8 + int.from_bytes(data[:8], "little")
        assert (len(data) - header_bytes) % unit == 0
        assert read(theirs, data) == payload == decoded(ours, theirs.block_hash, data)
        padding = len(data) - len(plain)
        marked = data[:header_bytes] + b"x" * padding + data[header_bytes + padding :]
        assert read(theirs, marked) == payload == decoded(ours, theirs.block_hash, marked)
        for other in (
            data[:header_bytes] + data[header_bytes + 1 :],
            data[:header_bytes] + b"\0" + data[header_bytes:],
            data[:header_bytes] + plain[header_bytes:],
            plain[:header_bytes] + data[header_bytes:],
        ):
            assert read(theirs, other) is None
            assert decoded(ours, theirs.block_hash, other) is None


MASTER = bytes(range(32))


def nonce_of(number: int, nbytes: int = 12) -> bytes:
    return bytes(range(number, number + nbytes))


def form_of(what: Expected, master: bytes = MASTER) -> EncryptedForm:
    (form,) = Keyring([master]).forms(name_of(what))
    return form


def encrypted(form: EncryptedForm, data: bytes) -> bytes:
    target = memoryview(bytearray(encryption.encrypted_bytes(len(data))))
    target[: encryption.HEADER_BYTES] = form.header(len(data))
    for number, inside, stored in encryption.segments_in(range(len(data))):
        segment, place = data[inside.start : inside.stop], target[stored.start : stored.stop]
        form.encrypt(segment, place, number, len(data), partial(nonce_of, number))
    return bytes(target)


def decrypted(form: EncryptedForm, data: bytes) -> bytes | None:
    nbytes = encryption.decrypted_bytes(len(data))
    if nbytes is None or data[: encryption.HEADER_BYTES] != form.header(nbytes):
        return None
    plain, view = bytearray(nbytes), memoryview(data)
    for number, inside, stored in encryption.segments_in(range(nbytes)):
        target = memoryview(plain)[inside.start : inside.stop]
        if not form.decrypt(view[stored.start : stored.stop], target, number, nbytes):
            return None
    return bytes(plain)


def forms_of_one(what: Expected) -> Iterator[tuple[bytes, bytes]]:
    """Payload and object: plain, and where it may be, compressed and padded."""
    payload = varied_payload_of(what)
    yield payload, write(what, payload)
    if may_be_compressed(what):
        yield payload, write_compressed(what, payload, is_padded=True)


def test_both_write_and_read_the_same_encrypted_objects(pair: tuple[Expected, ChunkFormat]) -> None:
    theirs, _ = pair
    form = form_of(theirs)
    assert form.key == encrypted_name_of(theirs, MASTER)
    for payload, inside in forms_of_one(theirs):
        data = write_encrypted(theirs, MASTER, inside, nonce_of)
        assert data == encrypted(form, inside)
        assert decrypted(form, data) == inside
        assert read_encrypted(theirs, MASTER, data) == payload
    for nbytes in (1, ENCRYPTED_SEGMENT_BYTES, ENCRYPTED_SEGMENT_BYTES + 1):
        data = write_encrypted(theirs, MASTER, inside[:nbytes], nonce_of)
        assert data == encrypted(form, inside[:nbytes])
        assert decrypt(theirs, MASTER, data) == inside[:nbytes]


def test_both_refuse_the_same_encrypted_objects(pair: tuple[Expected, ChunkFormat]) -> None:
    theirs, _ = pair
    form, inside = form_of(theirs), write(theirs, payload_of(theirs))
    good = write_encrypted(theirs, MASTER, inside, nonce_of)
    step = ENCRYPTED_SEGMENT_BYTES + 28
    changes: list[dict[str, Any]] = [
        {"block_hash": b"another"},
        {"shard": "h0-3of8-l0-31of32"},
        {"coverage": 1},
        {"namespace": "f" * 32},
    ]
    bad = [write_encrypted(theirs._replace(**c), MASTER, inside, nonce_of) for c in changes]
    bad += [write_encrypted(theirs, bytes(32), inside, nonce_of), inside, good[:-1], good + b"\0"]
    bad += [good[:256], good[:284], b"", good[: 256 + step]]
    bad.append(good[:256] + good[256 + step :][:step] + good[256 : 256 + step])
    for at in (0, 8, 100, 255, 256, 268, 300, 256 + step, len(good) - 1):
        bad.append(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
    for data in bad:
        assert decrypt(theirs, MASTER, data) is None
        assert decrypted(form, data) is None
    for change in changes:
        moved = theirs._replace(**change)
        assert encrypted_name_of(moved, MASTER) != encrypted_name_of(theirs, MASTER)
        assert form_of(moved).key == encrypted_name_of(moved, MASTER)


def test_the_prefix_is_in_no_key(pair: tuple[Expected, ChunkFormat]) -> None:
    theirs, _ = pair
    inside = b"an object"
    data = write_encrypted(theirs, MASTER, inside, nonce_of)
    copied = theirs._replace(prefix="a/copy")
    assert decrypt(copied, MASTER, data) == inside == decrypted(form_of(copied), data)


def test_the_header_of_a_segment_is_the_one_of_the_page() -> None:
    page = (ROOT / "docs" / "object-format.md").read_text()
    assert " ".join(re.findall("." * 8, blosc2_header(1_048_576, 734_003, 2).hex())) in page


def test_names_are_the_same(pair: tuple[Expected, ChunkFormat]) -> None:
    theirs, ours = pair
    place = Namespace(theirs.prefix, theirs.namespace)
    assert name_of(theirs) == place.chunk(ChunkKey(0, theirs.block_hash), ours.shard)


def test_namespaces_are_the_same() -> None:
    fingerprint = {"b": [1, None, {"z": True, "a": "é"}], "a": {"rope": 1.5}}
    namespace, manifest = namespace_of(fingerprint)
    assert namespace == fingerprint_digest(fingerprint)
    assert manifest == canonical_json(fingerprint)


def test_the_identity_of_the_key_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, SECRET.decode())
    integrity = Integrity.of(Config(bucket="b2", integrity="blake3-keyed"))
    assert integrity.identity()["key_id"] == key_id()


def test_the_example_of_the_page_is_one() -> None:
    page = (ROOT / "docs" / "object-format.md").read_text()
    _, name, header = re.findall(r"```text\n(.*?)\n```", page, re.DOTALL)
    of = attrgetter("name", "dtype", "shape", "order")
    tensors = tuple(
        Tensor(t.name, t.dtype, t.shape, tuple(Layer(*of(x)) for x in t.layers))
        for t in format_example.TENSORS
    )
    chunk, block_hash = format_example.CHUNK, bytes(range(32))
    what = Expected(
        *("s3kv", chunk.namespace_digest, 1, "h0-3of8-l0-2of3", block_hash),
        *(14, 2, tensors, "xxh3-128"),
    )
    assert name == name_of(what)
    data = write(what, bytes(range(sum(t.nbytes for t in tensors))))
    assert data == bytes(format_example.example())
    assert data[8:4096].decode().rstrip() == header.replace("\n", "")
    assert (len(data), int.from_bytes(data[:8], "little")) == (4162, 4088)
    assert "object of 4,162 bytes: N is 4,088" in page
    stored = write_encrypted(what, MASTER, data, nonce_of)
    assert stored == encrypted(form_of(what), data)
    key_id = MasterKey(MASTER).id
    for said in (encrypted_name_of(what, MASTER), key_id, hashlib.sha256(stored).hexdigest()):
        assert f"`{said}`" in page
