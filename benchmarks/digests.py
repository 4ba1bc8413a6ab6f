"""How long digests of weights and of media take: `python -m benchmarks.digests [GiB] [folder]`.

Prints JSON. Each time stands beside its floor, the time to read the same bytes once and do nothing
with them, and their ratio. The weights are safetensors files with the tensors of Llama-3-8B, as
many layers as fit into the given size (2 GiB by default). They are read from the page cache and,
after the kernel was asked to drop them, from the disk of `folder` (by default the temporary one).
The media are processed images and clips as an engine core holds them. The least of the rounds.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.deadline import ends, say
from s3kv.connectors import weights
from s3kv.connectors.media import MediaDigests
from s3kv.connectors.weights import FULL, SAMPLED, DigestCache, weights_digest

GIB = 2**30
ROUNDS = 5
READ_BYTES, THREADS = 4 * 2**20, 8
"""As `s3kv.connectors.weights` reads."""
LAYER = {
    "input_layernorm": (4096,),
    "mlp.down_proj": (4096, 14336),
    "mlp.gate_proj": (14336, 4096),
    "mlp.up_proj": (14336, 4096),
    "post_attention_layernorm": (4096,),
    "self_attn.k_proj": (1024, 4096),
    "self_attn.o_proj": (4096, 4096),
    "self_attn.q_proj": (4096, 4096),
    "self_attn.v_proj": (1024, 4096),
}
MEDIA = {"image of 336 x 336": (1, 3, 336, 336), "20 MB": (5_000_000,), "80 MB": (20_000_000,)}
"""Shapes of float32 tensors."""


def write_weights(folder: Path, nbytes: int) -> list[Path]:
    """One file per layer, of random numbers."""
    generator = torch.Generator().manual_seed(1)
    files: list[Path] = []
    while sum(file.stat().st_size for file in files) < nbytes:
        tensors = {
            f"model.layers.{len(files)}.{name}.weight": torch.randint(
                0, 2**15, shape, dtype=torch.int16, generator=generator
            )
            for name, shape in LAYER.items()
        }
        files.append(folder / f"model-{len(files):05}.safetensors")
        save_file(tensors, files[-1])
        with files[-1].open("rb") as file:
            os.fsync(file.fileno())
    return files


def read_once(files: list[Path]) -> None:
    def read(path: Path) -> None:
        buffer = bytearray(READ_BYTES)
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(read, files))


def drop_from_page_cache(files: list[Path]) -> None:
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def least_s(work: Callable[[], object], prepare: Callable[[], object] = lambda: None) -> float:
    rounds = []
    for _ in range(ROUNDS):
        prepare()
        start_s = perf_counter()
        work()
        rounds.append(perf_counter() - start_s)
    return min(rounds)


def beside_floor(times_s: dict[str, float], floor_s: float) -> dict[str, Any]:
    return {
        "read_once_ms": round(floor_s * 1e3, 3),
        **{
            name: {"ms": round(time_s * 1e3, 3), "of_reading_once": round(time_s / floor_s, 4)}
            for name, time_s in times_s.items()
        },
    }


def measure_weights(folder: Path, nbytes: int) -> dict[str, Any]:
    files = write_weights(folder, nbytes)
    nothing = DigestCache(None)
    works = {
        method: partial(weights_digest, str(folder), method, cache=nothing)
        for method in (SAMPLED, FULL)
    }
    report: dict[str, Any] = {"bytes": sum(f.stat().st_size for f in files), "files": len(files)}
    for place, prepare in {
        "page cache": lambda: None,
        "disk": lambda: drop_from_page_cache(files),
    }.items():
        say(f"weights from {place}")
        floor_s = least_s(lambda: read_once(files), prepare)
        times_s = {name: least_s(work, prepare) for name, work in works.items()}
        report[place] = beside_floor(times_s, floor_s)
    report["remembered_ms"] = round(remembered_s(folder) * 1e3, 3)
    return report


def remembered_s(folder: Path) -> float:
    weights._MIN_AGE_NS = 0  # instead of waiting a minute
    with tempfile.TemporaryDirectory() as place:
        cache = DigestCache(Path(place), trusted=frozenset({folder.stat().st_dev}))
        return least_s(lambda: weights_digest(str(folder), SAMPLED, cache=cache))


class Item(dict[str, Any]):
    """A processed item as vLLM holds it, as far as digests look at it."""


def _digest(feature: Any) -> bytes | None:
    return MediaDigests().of(feature)


def measure_media() -> dict[str, Any]:
    report = {}
    position = SimpleNamespace(get_num_embeds=lambda: 1)
    for name, shape in MEDIA.items():
        pixels = torch.rand(shape)
        item = Item(pixel_values=SimpleNamespace(data=pixels))
        feature: Any = SimpleNamespace(data=item, mm_position=position)
        numbers = pixels.view(-1).view(torch.int64)
        floor_s = least_s(numbers.sum)
        digest_s = least_s(partial(_digest, feature))
        report[name] = {"bytes": pixels.nbytes, **beside_floor({"blake3": digest_s}, floor_s)}
    return report


@ends(600)
def main() -> None:
    torch.set_num_threads(1)
    logging.disable()
    gib = float(sys.argv[1]) if len(sys.argv) > 1 else 2.0
    where = sys.argv[2] if len(sys.argv) > 2 else None
    with tempfile.TemporaryDirectory(dir=where) as folder:
        of_weights = measure_weights(Path(folder), int(gib * GIB))
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], text=True).strip()
    report = {
        "benchmark": "digests",
        "command": f"python -m benchmarks.digests {gib:g}",
        "commit": commit,
        "machine": {"processors": os.cpu_count(), "python": platform.python_version()},
        "rounds": ROUNDS,
        "weights": of_weights,
        "media": measure_media(),
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
