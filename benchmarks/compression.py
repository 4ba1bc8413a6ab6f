"""How far KV shrinks, and what that costs a core: `python -m benchmarks.compression`.

Chunks of 256 tokens in the layout of SmolLM2-135M on a GPU: block after block of 16 tokens, of a
block layer after layer. The KV is of 2,048 tokens of this repository's own text, and of random
numbers, as models with random weights have it. `ratio` is the length of the compressed objects over
that of the plain ones, headers included; `entropy` the shortest that a code for single bytes can
get, of the bytes grouped by their significance. Speeds are GB/s of plain bytes on one core, the
best round of each chunk: of `Envelope.encode`, and of `Decoding` once all has arrived, digests
included. `memcpy_gb_per_s` is a copy of the same chunks in the same run.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, TypeVar

import numpy as np
import torch

from benchmarks.deadline import command_line, ends, say
from benchmarks.origin import ROOT
from benchmarks.rig import machine, publish
from lab import smollm
from s3kv.objects import compression
from s3kv.objects.codec import ChunkFormat
from s3kv.objects.envelope import Decoding, Envelope
from s3kv.place import Place
from s3kv.types import TensorSpec, item_bytes

TEXT = ROOT / "docs" / "operating.md"
TOKENS, CHUNK_TOKENS, BLOCK_TOKENS = 2_048, 256, 16
LAYERS, HEADS, CONTENT = 30, 3, 2 * 64
"""Of SmolLM2-135M. Content: the keys and values of one head and token."""
HASH = bytes(32)
MODEL = "SmolLM2-135M"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Kind:
    """The payloads of chunks, one for each."""

    name: str
    dtype: str
    chunks: list[bytes]


def layout(dtype: str) -> ChunkFormat:
    page = (BLOCK_TOKENS, HEADS, CONTENT)
    layers = tuple(TensorSpec(f"layers.{i}", dtype, page, (), "NHC") for i in range(LAYERS))
    tensor = TensorSpec.of_layers("g0", CHUNK_TOKENS // BLOCK_TOKENS, layers)
    return ChunkFormat("0" * 32, (tensor,), 0, "h0-2of3-l0-29of30")


def kinds() -> Iterator[Kind]:
    """All that can be made here."""
    generator = torch.Generator().manual_seed(1)
    chunks = TOKENS // CHUNK_TOKENS
    shape = (chunks, layout("BF16").payload_bytes // torch.bfloat16.itemsize)
    kv = kv_of_smollm()
    if kv is not None:
        yield Kind(f"{MODEL}, bf16", "BF16", as_bytes(kv))
        yield Kind(f"{MODEL}, fp16", "F16", as_bytes(kv.half()))
        yield Kind(f"{MODEL}, fp8 (e4m3)", "F8_E4M3", as_bytes(kv.to(torch.float8_e4m3fn)))
    normal = torch.randn(shape, generator=generator).bfloat16()
    yield Kind("normal random numbers, bf16", "BF16", as_bytes(normal))
    noise = torch.randint(-(2**15), 2**15, shape, generator=generator, dtype=torch.int16)
    yield Kind("random bytes", "BF16", as_bytes(noise))


def as_bytes(chunks: torch.Tensor) -> list[bytes]:
    return [chunk.contiguous().view(torch.uint8).numpy().tobytes() for chunk in chunks]


def kv_of_smollm() -> torch.Tensor | None:
    """[chunk, number] in payload order; None without the model."""
    directory = smollm.directory()
    if directory is None:
        return None
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    asked = tokenizer(TEXT.read_text(), return_tensors="pt", truncation=True, max_length=TOKENS)
    with torch.no_grad():
        cache = model(asked.input_ids, use_cache=True).past_key_values
    # Of every layer [head, token, content].
    layers = [torch.cat((layer.keys[0], layer.values[0]), -1) for layer in cache.layers]
    blocks = torch.stack(layers).unflatten(2, (-1, BLOCK_TOKENS)).permute(2, 0, 3, 1, 4)
    chunks: torch.Tensor = blocks.reshape(TOKENS // CHUNK_TOKENS, -1)
    return chunks


def entropy(kind: Kind) -> float:
    """Bits per bit, of the bytes of each significance by themselves."""
    planes = np.frombuffer(b"".join(kind.chunks), np.uint8).reshape(-1, item_bytes(kind.dtype)).T
    bits = 0.0
    for plane in planes:
        share = np.bincount(plane) / len(plane)
        share = share[share > 0]
        bits -= float((share * np.log2(share)).sum())
    return bits / 8 / len(planes)


class Stopwatch:
    """The sum of the best times of several pieces of work."""

    def __init__(self, rounds: int) -> None:
        self.seconds = 0.0
        self._rounds = range(rounds)

    def run(self, work: Callable[..., T], prepare: Callable[[], tuple[Any, ...]] = tuple) -> T:
        """The last result of `work`. It takes what `prepare` returns, which is not timed."""
        times = []
        for _ in self._rounds:
            given = prepare()
            start_s = perf_counter()
            found = work(*given)
            times.append(perf_counter() - start_s)
        self.seconds += min(times)
        return found

    def gb_per_s(self, nbytes: int) -> float:
        return round(nbytes / self.seconds / 1e9, 2)


def measured(kind: Kind, codec: compression.Codec, rounds: int) -> dict[str, float | None]:
    """Whole objects. A chunk that does not shrink has no decoding."""
    chunk = layout(kind.dtype)
    envelope = Envelope.of(chunk)
    assert envelope is not None
    place = Place.of(bytearray(chunk.object_bytes), chunk.header_bytes)
    encoding, decoding = Stopwatch(rounds), Stopwatch(rounds)
    stored_bytes = decoded_bytes = 0
    for payload in kind.chunks:
        place.payload[:] = payload
        parts = encoding.run(lambda: envelope.encode(place, HASH, codec, lambda: False))
        stored_bytes += chunk.object_bytes if parts is None else sum(map(len, parts))
        if parts is not None:
            stored = b"".join(parts)
            decoding.run(_decode, partial(_arrived, envelope, place, stored, codec))
            decoded_bytes += len(payload)
            assert place.payload == payload
    plain_bytes = len(kind.chunks) * chunk.payload_bytes
    return {
        "ratio": round(stored_bytes / len(kind.chunks) / chunk.object_bytes, 3),
        "entropy": round(entropy(kind), 3),
        "encode_gb_per_s": encoding.gb_per_s(plain_bytes),
        "decode_gb_per_s": decoding.gb_per_s(decoded_bytes) if decoded_bytes else None,
    }


def _arrived(
    envelope: Envelope, place: Place, stored: bytes, codec: compression.Codec
) -> tuple[Decoding, int]:
    """The decoding of an object that has arrived in its place, and its length."""
    decoding = Decoding(envelope, place, len(stored), HASH, codec)
    decoding.place_of(range(len(stored))).write(stored)
    return decoding, len(stored)


def _decode(decoding: Decoding, nbytes: int) -> None:
    decoding.advance(nbytes)
    assert decoding.is_done
    assert decoding.reason is None


def memcpy(kind: Kind, rounds: int) -> float:
    copying, target = Stopwatch(rounds), memoryview(bytearray(len(kind.chunks[0])))
    for payload in kind.chunks:
        copying.run(partial(target.__setitem__, slice(None), payload))
    return copying.gb_per_s(sum(map(len, kind.chunks)))


@ends(600)
def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line(__doc__, "two rounds of one chunk")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args(arguments)
    codec = compression.codec()
    if codec is None:
        sys.exit("this version of blosc2 writes another format")
    made = list(kinds())
    left_out = [] if made[0].name.startswith(MODEL) else [MODEL]
    if args.quick:
        args.rounds, made = 2, [Kind(kind.name, kind.dtype, kind.chunks[:1]) for kind in made]
    rows = {}
    for kind in made:
        say(kind.name)
        rows[kind.name] = measured(kind, codec, args.rounds)
    result = {
        "benchmark": "compression",
        "machine": machine(),
        "blosc2": importlib.import_module(compression.NAME).__version__,
        "chunks": f"{len(made[0].chunks)} of {CHUNK_TOKENS} tokens",
        "rounds": args.rounds,
        "memcpy_gb_per_s": memcpy(made[0], args.rounds),
        "kinds": rows,
        "left_out": left_out,
    }
    publish(result, args.json)


if __name__ == "__main__":
    main()
