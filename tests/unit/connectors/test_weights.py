"""Telling weights apart by their files."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Sequence
from pathlib import Path

import pytest

from s3kv.connectors.weights import (
    FULL,
    METHODS,
    SAMPLED,
    adapter_digest,
    digest_files,
    weights_digest,
)

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
    """Two shards of over 16 MiB, in matrices of 2 MiB and norms of 8 KiB; where each tensor is."""
    draw, where = random.Random(0), {}
    for shard in range(2):
        tensors = {}
        for layer in range(4):
            tensors[f"{shard}.{layer}.matrix"] = draw.randbytes(MATRIX_BYTES)
            tensors[f"{shard}.{layer}.norm"] = draw.randbytes(NORM_BYTES)
        file = place / f"model-{shard}.safetensors"
        where |= {name: (file, *span) for name, span in write_tensors(file, tensors).items()}
    (place / "config.json").write_text("{}")
    return place, where


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return build(tmp_path)


def digest(place: Path, method: str = SAMPLED) -> str | None:
    return weights_digest(str(place), method)


def overwrite(file: Path, offset: int, data: bytes) -> None:
    with file.open("r+b") as handle:
        handle.seek(offset)
        handle.write(data)


def flip(file: Path, offset: int, length: int, mask: int = 255, *, every: int = 1) -> None:
    """Flip bits of each byte, or of every second one. A second call flips them back."""
    with file.open("rb") as handle:
        handle.seek(offset)
        data = bytearray(handle.read(length))
    data[::every] = bytes(byte ^ mask for byte in data[::every])
    overwrite(file, offset, data)


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
    seen = {digest(place, method)}
    names = [name for name in where if name.endswith(kind)]
    for name in names:
        flip(*where[name], mask=1, every=2)
        seen.add(digest(place, method))
        flip(*where[name], mask=1, every=2)
    assert len(seen) == len(names) + 1
    assert digest(place, method) in seen


@pytest.mark.parametrize(
    ("tensor", "begins", "method"),
    [*[("1.3.norm", [byte], SAMPLED) for byte in (0, 1, 4_095, NORM_BYTES - 1)]]
    # One of 32 heads, as an output projection has them: 128 elements in each row of 4,096.
    + [("1.0.matrix", range(256 * head, MATRIX_BYTES, 8_192), SAMPLED) for head in range(0, 32, 3)]
    + [("0.2.matrix", [MATRIX_BYTES // 3], FULL)],
)
def test_a_changed_part_is_another_model(
    model: Model, tensor: str, begins: Sequence[int], method: str
) -> None:
    place, where = model
    before = digest(place, method)
    file, offset, _ = where[tensor]
    for begin in begins:
        flip(file, offset + begin, 1 if len(begins) == 1 else 256)
    assert digest(place, method) != before


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
        flip(file, at, size)
        missed += digest_files(place.glob("*.safetensors")).hexadecimal == before.hexadecimal
        flip(file, at, size)
    assert missed / tries == pytest.approx(expected, abs=0.08 if expected else 0)


def test_samples_are_few(model: Model) -> None:
    files = list(model[0].glob("*.safetensors"))
    total = sum(file.stat().st_size for file in files)
    assert digest_files(files, FULL).nbytes == total
    assert digest_files(files).nbytes < total / 20


def test_files_and_the_names_of_tensors_count(model: Model) -> None:
    """Files that come, go, grow or change names."""
    place, _ = model
    first, last = place / "model-0.safetensors", place / "model-9.safetensors"
    seen = [digest(place)]
    for change in (
        lambda: (place / "model-1.safetensors").rename(last),
        last.unlink,
        lambda: first.write_bytes(first.read_bytes() + b"x"),
        lambda: overwrite(first, 12, b"x"),
        lambda: (place / "model.safetensors.index.json").write_text("{}"),
    ):
        change()
        seen.append(digest(place))
    assert len(set(seen)) == len(seen)


def test_headers_are_read_whole(tmp_path: Path) -> None:
    """Though they are longer than a tensor that is: here 0.3 MB of names."""
    file = tmp_path / "model.safetensors"
    names = range(1_000, 5_000)
    write_tensors(file, {f"layer.{n}": b"12" for n in names} | {"matrix": bytes(17 * 2**20)})
    header, seen = file.read_bytes()[: 2**19], {digest(tmp_path)}
    for name in names[::100]:
        overwrite(file, header.index(b"layer.%d" % name), b"Layer")
        seen.add(digest(tmp_path))
    assert len(seen) == 1 + len(names[::100])


def headed(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    "start",
    [
        b"",
        b"\xff" * 8,
        struct.pack("<Q", 2**40),
        headed(b"[1, 2, 3"),
        headed(b'{"a": 1}'),
        headed(b'{"a": {}}'),
        headed(b'{"a": {"data_offsets": [0, 99999999]}}'),
        headed(b'{"a": {"data_offsets": [-9, -1]}}'),
        headed(b'{"a": {"data_offsets": [9, 8]}}'),
        headed(b'{"a": {"data_offsets": ["a", 1]}}'),
        headed(b'{"a": {"data_offsets": [0.5, 9.5]}}'),
        headed(b'{"\xff": {"data_offsets": [0, 9]}}'),
        headed(b"[" * 20_000),
    ],
    ids=lambda start: str(start[8:48]),
)
def test_other_formats_have_a_block_in_every_64_kib(tmp_path: Path, start: bytes) -> None:
    """Damaged safetensors files are such, too."""
    file = tmp_path / "model.safetensors"
    file.write_bytes(start + random.Random(1).randbytes(20 * 2**20))
    before = digest(file)
    flip(file, 7 * 2**20 + 100, 2**17)
    assert digest(file) != before


def test_small_files_are_read_whole(tmp_path: Path) -> None:
    """Whatever else is beside them: here 20 MiB."""
    (tmp_path / "adapter_model.bin").write_bytes(bytes(20 * 2**20))
    config = tmp_path / "adapter_config.json"
    seen = set()
    for alpha in (16, 32, 64):
        config.write_text(json.dumps({"filler": "x" * 1_000_000, "lora_alpha": alpha}))
        seen.add(adapter_digest(str(tmp_path)).hexadecimal)
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
    for content in ((b"33", b"22"), (b"22", b"33")):
        in_folders(place, transformer=content[0], vision=content[1])
        seen.append(digest(place))
    files = sorted(place.glob("*/*"))
    assert digest_files(files).hexadecimal == digest_files(files[::-1]).hexadecimal == seen[2]
    write_tensors(place / "model.safetensors", {"w": b"44"})
    assert None not in seen
    assert len({*seen, digest(place)}) == 4


def test_a_folder_beside_an_adapter_does_not_count(tmp_path: Path) -> None:
    """vLLM reads an adapter from its directory alone; trainers keep checkpoints in there."""
    write_tensors(tmp_path / "adapter_model.safetensors", {"a": b"11"})
    before = adapter_digest(str(tmp_path))
    in_folders(tmp_path, checkpoint=b"22")
    assert adapter_digest(str(tmp_path)) == before
