"""The benchmark of compressed objects: its figures against what a hand can work out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("blosc2")

from benchmarks import compression
from benchmarks.compression import Kind, Stopwatch
from lab import smollm
from s3kv.objects.compression import codec
from scripts import results


def a_chunk(dtype: str, content: bytes) -> Kind:
    nbytes = compression.layout(dtype).payload_bytes
    return Kind("content", dtype, [content * (nbytes // len(content))])


def test_chunks_have_the_size_of_the_models() -> None:
    chunk = compression.layout("BF16")
    assert chunk.payload_bytes == compression.CHUNK_TOKENS * smollm.KV_BYTES_PER_TOKEN
    assert compression.layout("F8_E4M3").payload_bytes * 2 == chunk.payload_bytes
    assert chunk.blocks * compression.BLOCK_TOKENS == compression.CHUNK_TOKENS


@pytest.mark.parametrize(
    ("dtype", "content", "bits"),
    [
        ("BF16", b"ab", 0.0),
        ("F8_E4M3", b"ab", 1.0 / 8),
        ("BF16", bytes(range(256)), 7.0 / 8),
        ("BF16", b"abcb", 1.0 / 16),
    ],
)
def test_the_entropy_is_of_the_bytes_of_one_significance(
    dtype: str, content: bytes, bits: float
) -> None:
    assert compression.entropy(a_chunk(dtype, content)) == pytest.approx(bits)


def test_whole_objects_are_measured() -> None:
    found = codec()
    low = compression.measured(a_chunk("BF16", b"ab"), found, rounds=1)
    assert 0 < low["ratio"] < 0.01
    assert low["decode_gb_per_s"] > 0
    generator = torch.Generator().manual_seed(1)
    nbytes = compression.layout("BF16").payload_bytes
    noise = torch.randint(0, 256, (1, nbytes), generator=generator, dtype=torch.uint8)
    high = compression.measured(Kind("noise", "BF16", compression.as_bytes(noise)), found, 1)
    assert high["ratio"] == 1.0
    assert high["decode_gb_per_s"] is None
    assert high["encode_gb_per_s"] > 0


def test_a_model_that_is_not_installed_is_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(compression, "kv_of_smollm", lambda: None)
    compression.main(["--quick", "--json", str(tmp_path / "result")])
    result = json.loads((tmp_path / "result").read_text())
    assert result["left_out"] == [compression.MODEL]
    assert list(result["kinds"]) == ["normal random numbers, bf16", "random bytes"]
    page = results.compression(result)
    assert "| random bytes | 1.000 | 1.000 |" in page
    assert "Not measured: SmolLM2-135M." in page


@pytest.mark.long
def test_the_kv_of_a_small_model_shrinks() -> None:
    kv = compression.kv_of_smollm()
    found = codec()
    if kv is None:
        pytest.skip("the weights are not installed")
    kind = Kind("kv", "BF16", compression.as_bytes(kv[:1]))
    row = compression.measured(kind, found, rounds=1)
    assert compression.entropy(kind) - 0.01 < row["ratio"] < 0.75


def test_the_best_of_the_rounds_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 3.0, 10.0, 12.0, 20.0, 25.0])
    monkeypatch.setattr(compression, "perf_counter", lambda: next(times))
    watch, given = Stopwatch(3), iter([1, 2, 3])
    assert watch.run(lambda number: number, lambda: (next(given),)) == 3
    assert watch.seconds == 2.0
    assert watch.gb_per_s(4 * 10**9) == 2.0
