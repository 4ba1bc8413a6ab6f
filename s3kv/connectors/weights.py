"""Digests of weights, made from the files that hold them.

A path does not identify weights, because its files may be replaced. Reading all of a large model
would take as long as loading it. So by default a digest is made of samples of every tensor; the
header of a safetensors file gives the place of each. Samples of files in other formats are denser.
Headers, small files and small tensors are read whole. A change of every element of a tensor is
always noticed. docs/security.md gives the samples, and the probability that a smaller change is
missed. The method "full" reads every byte.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from s3kv.config import count
from s3kv.types import ENGINE_LOG

logger = logging.getLogger(ENGINE_LOG)

SAMPLED, FULL = METHODS = ("sampled", "full")
_VERSION = 2
"""Version of the method. Digests of different versions are never equal."""

_PATTERNS = (
    *("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.safetensors.index.json"),
    "*/*.safetensors",  # Some models have weights in folders of their own: Cosmos3, Kimi-Audio.
)
_BLOCK_BYTES = 1024
_WHOLE_DIRECTORY_BYTES = 16 * 2**20
_WHOLE_FILE_BYTES = 2**20
_WHOLE_TENSOR_BYTES = 64 * 2**10
_MOST_BLOCKS, _FEWEST_BLOCKS = 64, 4
"""Limits for one tensor."""
_BLOCKS_PER_MODEL = 512 * _MOST_BLOCKS
_GOLDEN_RATIO = 0.618_033_988_749_894_9
_DENSE_STEP_BYTES = 64 * 2**10
_READ_BYTES = 4 * 2**20
_HEADER_MAX_BYTES = 100 * 2**20
"""The limit of safetensors itself."""
_THREADS = 8
_DIGEST_LENGTH = 32

Offset = Annotated[int, Meta(ge=0)]
FileRange = tuple[int, int]
"""Offset and length, in bytes."""


@dataclass(frozen=True, slots=True)
class Digest:
    """Digest of a set of files. nbytes: bytes read out of `total_bytes`. stamps: times, inode and
    device of each file before it was read. They stay equal while the file is unchanged."""

    hexadecimal: str
    nbytes: int
    total_bytes: int
    stamps: tuple[tuple[int, ...], ...]


def weights_digest(path: str, method: str = SAMPLED) -> str | None:
    """Digest of the weights in a directory or file; None if the path has no weights or does not
    exist.
    The same files have the same digest under any path. method: "sampled" or "full"; their digests
    are never equal. Raises `OSError` for files that cannot be read."""
    place = Path(path)
    files = [place] if place.is_file() else _files(place, *_PATTERNS)
    if not files:
        return None
    started_s = time.monotonic()
    digest = digest_files(files, method)
    logger.info(
        "s3kv: weights in %s are %s (%s: read %s of %s bytes in %s, %.2f s)",
        path,
        digest.hexadecimal,
        method,
        f"{digest.nbytes:,}",
        f"{digest.total_bytes:,}",
        count(len(files), "file"),
        time.monotonic() - started_s,
    )
    return digest.hexadecimal


def adapter_digest(path: str, method: str = SAMPLED) -> Digest | None:
    """Digest of all files of an adapter's directory; None if there is no such directory or no file
    in it. Raises `OSError` for files that cannot be read."""
    files = _files(Path(path), "*")
    return digest_files(files, method) if files else None


def _files(directory: Path, *patterns: str) -> list[Path]:
    """The files in a directory that fit any of the patterns; none if there is no such directory."""
    found = {path for pattern in patterns for path in directory.glob(pattern)}
    return [path for path in found if path.is_file()]


def digest_files(files: Iterable[Path], method: str = SAMPLED) -> Digest:
    """One digest of all files. It includes their names, unless there is only one file.
    Reads in several threads. Raises `OSError` for files that cannot be read."""
    ordered = sorted(files)
    found = [file.stat() for file in ordered]
    sizes = [at.st_size for at in found]
    stamps = tuple((at.st_mtime_ns, at.st_ctime_ns, at.st_ino, at.st_dev) for at in found)
    plans = _plans(ordered, sizes, method)
    with ThreadPoolExecutor(_THREADS) as pool:
        parts = list(pool.map(_digest_spans, ordered, plans))
    whole = hashlib.sha256(f"{_VERSION} {method}".encode())
    for file, size, part in zip(ordered, sizes, parts, strict=True):
        name = file.name if len(ordered) > 1 else ""
        whole.update(f"{len(name.encode())} {name} {size} ".encode() + part)
    nbytes = sum(length for spans in plans for _, length in spans)
    return Digest(whole.hexdigest()[:_DIGEST_LENGTH], nbytes, sum(sizes), stamps)


def _plans(files: Sequence[Path], sizes: Sequence[int], method: str) -> list[list[FileRange]]:
    """The spans to read of each file."""
    if method == FULL or sum(sizes) <= _WHOLE_DIRECTORY_BYTES:
        return [[(0, size)] for size in sizes]
    parts = [
        [(0, size)] if size <= _WHOLE_FILE_BYTES else _parts(file, size)
        for file, size in zip(files, sizes, strict=True)
    ]
    large = sum(length > _WHOLE_TENSOR_BYTES for spans in parts for _, length in spans[1:])
    blocks = max(_FEWEST_BLOCKS, min(_MOST_BLOCKS, _BLOCKS_PER_MODEL // max(1, large)))
    return [_plan(size, spans, blocks) for size, spans in zip(sizes, parts, strict=True)]


def _plan(size: int, parts: list[FileRange], blocks: int) -> list[FileRange]:
    """The spans to read of a file: its first part, and samples of the other large ones."""
    if not parts:
        return _spread(0, size, -(-size // _DENSE_STEP_BYTES))
    plan = parts[:1]
    for offset, length in parts[1:]:
        whole = length <= _WHOLE_TENSOR_BYTES
        plan += [(offset, length)] if whole else _spread(offset, length, blocks)
    return plan


def _spread(offset: int, length: int, blocks: int) -> list[FileRange]:
    """One block in each of `blocks` equal parts of a span. Each starts at an element of any dtype.
    The place within the part differs from block to block. With equal distances, all blocks might
    lie in the same columns of a matrix."""
    room = max(0, length // blocks - _BLOCK_BYTES)
    spans = []
    for number in range(blocks):
        start = number * length // blocks + int(room * (number * _GOLDEN_RATIO % 1))
        start -= start % 64
        spans.append((offset + start, min(_BLOCK_BYTES, length - start)))
    return spans


class _Tensor(msgspec.Struct):
    data_offsets: tuple[Offset, Offset]


def _parts(path: Path, size: int) -> list[FileRange]:
    """The spans of a safetensors file's header and tensors; none for a file in another format."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(size - 8, _HEADER_MAX_BYTES):
            return []
        text = file.read(length)
    start = 8 + length
    try:
        header = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        tensors = [msgspec.json.decode(tensor, type=_Tensor) for tensor in header.values()]
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return []
    spans = sorted((start + begin, end - begin) for begin, end in (t.data_offsets for t in tensors))
    is_sound = all(0 <= length <= size - offset for offset, length in spans)
    return [(0, start), *spans] if is_sound else []


def _digest_spans(path: Path, spans: Iterable[FileRange]) -> bytes:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        for offset, length in spans:
            end = offset + length
            while offset < end:
                data = os.pread(file.fileno(), min(_READ_BYTES, end - offset), offset)
                if not data:
                    raise OSError(f"{path} became shorter while it was read")
                digest.update(data)
                offset += len(data)
    return digest.digest()
