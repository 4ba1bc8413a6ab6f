"""Telling weights apart by their files."""

from __future__ import annotations

import json
import os
import random
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from s3kv.connectors.weights import (
    FULL,
    METHODS,
    SAMPLED,
    DigestCache,
    adapter_digest,
    digest_files,
    weights_digest,
)

FORGETFUL = DigestCache(None)
NORM_BYTES, MATRIX_BYTES = 8_192, 2 * 2**20


def write_tensors(file: Path, tensors: dict[str, bytes]) -> dict[str, tuple[int, int]]:
    """A safetensors file; where each tensor lies in it: offset and length."""
    header, offset = {}, 0
    for name, data in tensors.items():
        shape, end = [len(data) // 2], offset + len(data)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(tensors.values()))
    start = 8 + len(text)
    return {
        name: (start + tensor["data_offsets"][0], len(tensors[name]))
        for name, tensor in header.items()
    }


Model = tuple[Path, dict[str, tuple[Path, int, int]]]


def build(place: Path) -> Model:
    """Two shards of a little more than 16 MiB together, in matrices of 2 MiB and norms of 8 KiB;
    where every tensor is.
    """
    draw, where = random.Random(0), {}
    for shard in range(2):
        tensors = {}
        for layer in range(4):
            tensors[f"{shard}.{layer}.matrix"] = draw.randbytes(MATRIX_BYTES)
            tensors[f"{shard}.{layer}.norm"] = draw.randbytes(NORM_BYTES)
        file = place / f"model-{shard}.safetensors"
        spans = write_tensors(file, tensors)
        where |= {name: (file, *span) for name, span in spans.items()}
    (place / "config.json").write_text("{}")
    return place, where


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return build(tmp_path)


def digest(place: Path, method: str = SAMPLED) -> str | None:
    return weights_digest(str(place), method, cache=FORGETFUL)


def overwrite(file: Path, offset: int, data: bytes) -> None:
    with file.open("r+b") as handle:
        handle.seek(offset)
        handle.write(data)


def flipped(file: Path, offset: int, length: int) -> bytes:
    """What is there with every bit changed."""
    with file.open("rb") as handle:
        handle.seek(offset)
        return bytes(255 - byte for byte in handle.read(length))


def test_the_same_files_are_the_same_anywhere(model: Model, tmp_path: Path) -> None:
    place, _ = model
    before = digest(place)
    assert before is not None
    linked = tmp_path / "linked"
    linked.mkdir()
    for file in place.iterdir():
        if file.is_file():
            (linked / file.name).symlink_to(file)
    assert digest(linked) == before
    (linked / "README.md").write_text("not a weight")
    assert digest(linked) == before
    assert digest(linked, FULL) != before, "samples and all are never taken for each other"


@pytest.mark.parametrize("kind", ["norm", "matrix"])
@pytest.mark.parametrize("method", METHODS)
def test_every_changed_tensor_is_another_model(model: Model, kind: str, method: str) -> None:
    """A single tensor, all of whose elements change by the lowest bit of each."""
    place, where = model
    before = digest(place, method)
    seen = {before}
    names = [name for name in where if name.endswith(kind)]
    for name in names:
        file, offset, length = where[name]
        with file.open("rb") as handle:
            handle.seek(offset)
            old = handle.read(length)
        changed = bytearray(old)
        changed[::2] = bytes(byte ^ 1 for byte in old[::2])
        overwrite(file, offset, changed)
        seen.add(digest(place, method))
        overwrite(file, offset, old)
    assert len(seen) == len(names) + 1
    assert digest(place, method) == before


@pytest.mark.parametrize("place_in_it", [0, 1, 4_095, NORM_BYTES - 1])
def test_one_byte_of_a_small_tensor_is_another_model(model: Model, place_in_it: int) -> None:
    place, where = model
    before = digest(place)
    file, offset, _ = where["1.3.norm"]
    at = offset + place_in_it
    overwrite(file, at, flipped(file, at, 1))
    assert digest(place) != before


@pytest.mark.parametrize(
    ("share", "expected"), [(1 / 256, 0.72), (1 / 128, 0.48), (1 / 64, 0.23), (1 / 32, 0.0)]
)
def test_how_often_a_change_of_a_part_of_a_matrix_is_missed(
    model: Model, share: float, expected: float
) -> None:
    """As docs/security.md has it, less the length of the blocks, here 1/32 of their parts."""
    place, where = model
    before = digest_files(place.glob("*.safetensors"))
    file, offset, length = where["0.2.matrix"]
    size = round(length * share)
    tries, missed = 128, 0
    for number in range(tries):
        # Evenly spread, and not in step with the blocks.
        at = offset + int((length - size) * (number * 2**0.5 % 1))
        old = flipped(file, at, size)
        overwrite(file, at, old)
        missed += digest_files(place.glob("*.safetensors")).hexadecimal == before.hexadecimal
        overwrite(file, at, flipped(file, at, size))
    assert missed / tries == pytest.approx(expected, abs=0.08 if expected else 0)


@pytest.mark.parametrize("column", range(0, 32, 3))
def test_changed_columns_are_another_model(model: Model, column: int) -> None:
    """One of 32 heads, as an output projection has them: 128 elements in each row of 4,096."""
    place, where = model
    before = digest(place)
    file, offset, length = where["1.0.matrix"]
    for row in range(0, length, 8_192):
        at = offset + row + 256 * column
        overwrite(file, at, flipped(file, at, 256))
    assert digest(place) != before


def test_all_is_read_where_it_is_asked_for(model: Model) -> None:
    place, where = model
    before = digest(place, FULL)
    file, offset, length = where["0.2.matrix"]
    overwrite(file, offset + length // 3, flipped(file, offset + length // 3, 1))
    assert digest(place, FULL) != before


def test_samples_are_few(model: Model) -> None:
    place, _ = model
    files = list(place.glob("*.safetensors"))
    total = sum(file.stat().st_size for file in files)
    assert digest_files(files, FULL).nbytes == total
    assert digest_files(files).nbytes < total / 20


def test_what_weights_are_in_changes_them(model: Model) -> None:
    """Files that come, go, grow or change names; names of tensors."""
    place, _ = model
    seen = [digest(place)]
    (place / "model-1.safetensors").rename(place / "model-9.safetensors")
    seen.append(digest(place))
    (place / "model-9.safetensors").unlink()
    seen.append(digest(place))
    with (place / "model-0.safetensors").open("ab") as file:
        file.write(b"x")
    seen.append(digest(place))
    overwrite(place / "model-0.safetensors", 12, b"x")
    seen.append(digest(place))
    (place / "model.safetensors.index.json").write_text("{}")
    seen.append(digest(place))
    assert len(set(seen)) == len(seen)


@pytest.mark.parametrize(
    "start",
    [
        b"",
        b"\xff" * 8,
        struct.pack("<Q", 2**40),
        struct.pack("<Q", 8) + b"[1, 2, 3",
        struct.pack("<Q", 8) + b'{"a": 1}',
        struct.pack("<Q", 38) + b'{"a": {"data_offsets": [0, 99999999]}}',
        struct.pack("<Q", 33) + b'{"a": {"data_offsets": [-9, -1]}}',
        struct.pack("<Q", 33) + b'{"a": {"data_offsets": ["a", 1]}}',
        struct.pack("<Q", 35) + b'{"a": {"data_offsets": [0.0, 9.0]}}',
        struct.pack("<Q", 20_000) + b"[" * 20_000,
    ],
    ids=["none", "huge", "long", "cut", "number", "past", "negative", "text", "floats", "deep"],
)
def test_other_formats_have_a_block_in_every_64_kib(tmp_path: Path, start: bytes) -> None:
    """Damaged safetensors files are such, too."""
    file = tmp_path / "model.safetensors"
    file.write_bytes(start + random.Random(1).randbytes(20 * 2**20))
    before = digest(file)
    at = 7 * 2**20 + 100
    overwrite(file, at, flipped(file, at, 2**17))
    assert digest(file) != before


@pytest.mark.parametrize("length", [600, 1_000_000])
def test_small_files_are_read_whole(tmp_path: Path, length: int) -> None:
    """Whatever else is beside them: here 20 MiB."""
    (tmp_path / "adapter_model.bin").write_bytes(bytes(20 * 2**20))
    config = tmp_path / "adapter_config.json"
    seen = set()
    for alpha in (16, 32, 64):
        config.write_text(json.dumps({"filler": "x" * length, "lora_alpha": alpha}))
        found = adapter_digest(str(tmp_path))
        assert found is not None
        seen.add(found.hexadecimal)
    assert len(seen) == 3


def test_no_weights_have_no_digest(model: Model, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    for nothing in (str(empty), "org/model"):
        assert weights_digest(nothing) is None
        assert adapter_digest(nothing) is None
    single = model[0] / "model-0.safetensors"
    moved = empty / "other.safetensors"
    moved.symlink_to(single)
    assert digest(moved) == digest(single), "one file is the same under any name"


def in_folders(place: Path, **content: bytes) -> Path:
    """Weights in folders of their own, each in a file of one name."""
    for name, data in content.items():
        (place / name).mkdir(parents=True, exist_ok=True)
        write_tensors(place / name / "model.safetensors", {"w": data})
    return place


def test_weights_in_folders_of_their_own_count(tmp_path: Path) -> None:
    place = in_folders(tmp_path / "model", transformer=b"11", vision=b"22")
    seen = [digest(place)]
    in_folders(place, transformer=b"33")
    seen.append(digest(place))
    in_folders(place, transformer=b"22", vision=b"33")
    seen.append(digest(place))
    in_folders(place, transformer=b"33", vision=b"22")
    assert seen[1] == digest(place)
    assert None not in seen
    assert len(set(seen)) == 3
    files = sorted(place.glob("*/*"))
    assert digest_files(files).hexadecimal == digest_files(files[::-1]).hexadecimal == seen[1]
    write_tensors(place / "model.safetensors", {"w": b"44"})
    assert digest(place) not in seen


def test_a_folder_beside_an_adapter_does_not_count(tmp_path: Path) -> None:
    """vLLM reads an adapter from its directory alone; trainers keep checkpoints in there."""
    write_tensors(tmp_path / "adapter_model.safetensors", {"a": b"11"})
    before = adapter_digest(str(tmp_path))
    in_folders(tmp_path, checkpoint=b"22")
    assert adapter_digest(str(tmp_path)) == before


# --- remembered -------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DigestCache:
    monkeypatch.setattr("s3kv.connectors.weights._MIN_AGE_NS", 0)
    device = tmp_path.stat().st_dev
    return DigestCache(tmp_path / "cache", trusted=frozenset({device}))


def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Calls of what reads files, from now on."""
    calls: list[int] = []

    def counted(*args: object) -> object:
        calls.append(1)
        return digest_files(*args)  # type: ignore[arg-type]

    monkeypatch.setattr("s3kv.connectors.weights.digest_files", counted)
    return calls


def test_files_that_nobody_changed_are_not_read_again(
    model: Model, cache: DigestCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, where = model
    calls = reads(monkeypatch)
    before = weights_digest(str(place), cache=cache)
    assert weights_digest(str(place), cache=cache) == before
    assert len(calls) == 1
    weights_digest(str(place), FULL, cache=cache)
    assert len(calls) == 2, "another method is another digest"
    file, offset, length = where["0.0.norm"]
    times = file.stat()
    overwrite(file, offset, flipped(file, offset, length))
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert weights_digest(str(place), cache=cache) != before, "the change time cannot be set"
    assert weights_digest(str(place), cache=cache) != before
    assert len(calls) == 3


def test_folders_that_change_places_are_read_again(
    tmp_path: Path, cache: DigestCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their files keep their names, inodes and times. A directory lists them in any order."""
    listed = Path.glob
    monkeypatch.setattr(Path, "glob", lambda *args: sorted(listed(*args), reverse=True))
    place = in_folders(tmp_path / "model", first=b"11", second=b"22")
    calls = reads(monkeypatch)
    before = weights_digest(str(place), cache=cache)
    assert weights_digest(str(place), cache=cache) == before
    for name, other in (("first", "third"), ("second", "first"), ("third", "second")):
        (place / name).rename(place / other)
    assert weights_digest(str(place), cache=cache) != before
    assert len(calls) == 2


def _damage(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-10] ^= 1
    file.write_bytes(data)


def _forge(file: Path) -> None:
    text = file.read_text()
    file.write_text(text[:-34] + "0" * 32 + text[-2:])


@pytest.mark.parametrize(
    "harm",
    [
        _damage,
        _forge,
        lambda file: file.write_bytes(b""),
        lambda file: file.write_bytes(b"\xff\x00"),
        lambda file: file.write_bytes(file.read_bytes()[:-1]),
        lambda file: file.chmod(0o666),
        lambda file: file.parent.chmod(0o777),
        lambda file: file.rename(file.with_suffix(".other")),
        lambda file: (file.rename(file.parent / "x"), file.symlink_to(file.parent / "x")),
        lambda file: (file.unlink(), file.mkdir()),
    ],
    ids=["damaged", "forged", "empty", "binary", "cut", "writable", "open", "gone", "link", "dir"],
)
def test_what_is_remembered_is_not_believed_blindly(
    model: Model,
    cache: DigestCache,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    harm: Callable[[Path], object],
) -> None:
    place, _ = model
    calls = reads(monkeypatch)
    before = weights_digest(str(place), cache=cache)
    (kept,) = (tmp_path / "cache").iterdir()
    harm(kept)
    assert weights_digest(str(place), cache=cache) == before
    assert len(calls) == 2


def test_young_files_and_untrusted_devices_are_not_remembered(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, _ = model
    device = tmp_path.stat().st_dev
    young = DigestCache(tmp_path / "young", trusted=frozenset({device}))
    weights_digest(str(place), cache=young)
    assert not (tmp_path / "young").exists()
    monkeypatch.setattr("s3kv.connectors.weights._MIN_AGE_NS", 0)
    elsewhere = DigestCache(tmp_path / "elsewhere", trusted=frozenset({device + 1}))
    weights_digest(str(place), cache=elsewhere)
    assert not (tmp_path / "elsewhere").exists()


def test_a_cache_that_cannot_be_written_is_none(
    model: Model, cache: DigestCache, tmp_path: Path
) -> None:
    (tmp_path / "cache").write_text("a file where the directory should be")
    before = weights_digest(str(model[0]), cache=cache)
    assert before is not None
    assert weights_digest(str(model[0]), cache=cache) == before
