"""Which weights these are, told by the files themselves.

A name or a path does not say: the directory under it may have been filled anew. Reading all of it
would take as long as loading it, so a digest is made of samples: names and lengths of all files,
and `_SAMPLE_BYTES` at evenly spaced places of each. Training changes nearly every weight, so other
weights are other samples; a change made to escape them would.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

_SAMPLE_BYTES = 64
_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


def weights_digest(path: str, *, samples: int = 2048) -> str | None:
    """Digest of the weights in a directory or file; None when there are none, or no such path.

    samples: places to look at, over all files. 2048 take about 20 ms where the files have been
    read a moment ago. Raises `OSError` for files that cannot be read.
    """
    place = Path(path)
    if place.is_file():
        return _digest([place], samples)
    if not place.is_dir():
        return None
    return _digest([p for p in place.iterdir() if p.suffix in _SUFFIXES], samples)


def adapter_digest(path: str, *, samples: int = 256) -> str | None:
    """The same for all files of an adapter's directory; None when it is no directory here."""
    place = Path(path)
    return _digest(_files(place), samples) if place.is_dir() else None


def adapter_stamp(path: str) -> tuple[tuple[str, int, int], ...]:
    """Changes when somebody writes to the adapter's files: name, length, time of each."""
    stats = [(p.name, p.stat()) for p in _files(Path(path))]
    return tuple(sorted((name, s.st_size, s.st_mtime_ns) for name, s in stats))


def _files(place: Path) -> list[Path]:
    return [p for p in place.iterdir() if p.is_file()]


def _digest(files: list[Path], samples: int) -> str | None:
    if not files:
        return None
    files = sorted(files, key=lambda p: p.name)
    sizes = [p.stat().st_size for p in files]
    step = max(4096, sum(sizes) // samples)
    digest = hashlib.sha256()
    for file, size in zip(files, sizes, strict=True):
        name = file.name if len(files) > 1 else ""  # one file is the same under any name
        digest.update(f"{name}\0{size}\0".encode())
        descriptor = os.open(file, os.O_RDONLY)
        try:
            for offset in range(0, size, step):
                digest.update(os.pread(descriptor, _SAMPLE_BYTES, offset))
        finally:
            os.close(descriptor)
    return digest.hexdigest()[:32]
