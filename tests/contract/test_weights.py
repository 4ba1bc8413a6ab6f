"""Telling weights apart by samples of their files."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from s3kv.connectors.weights import adapter_digest, adapter_stamp, weights_digest


@pytest.fixture
def place(tmp_path: Path) -> Path:
    place = tmp_path / "model"
    place.mkdir()
    for number in range(3):
        data = random.Random(number).randbytes(300_000 + number)
        (place / f"model-{number}.safetensors").write_bytes(data)
    (place / "config.json").write_text("{}")
    return place


def test_the_same_files_are_the_same_anywhere(place: Path, tmp_path: Path) -> None:
    before = weights_digest(str(place))
    assert before is not None
    linked = tmp_path / "linked"
    linked.mkdir()
    for file in place.iterdir():
        (linked / file.name).symlink_to(file)
    assert weights_digest(str(linked)) == before
    (linked / "README.md").write_text("not a weight")
    assert weights_digest(str(linked)) == before


@pytest.mark.parametrize("name", ["model-0.safetensors", "model-2.safetensors"])
def test_other_weights_of_the_same_shape_are_others(place: Path, name: str) -> None:
    before = weights_digest(str(place))
    size = (place / name).stat().st_size
    (place / name).write_bytes(random.Random(9).randbytes(size))
    assert weights_digest(str(place)) != before


def test_files_that_come_go_grow_or_change_names_are_others(place: Path) -> None:
    seen = [weights_digest(str(place))]
    (place / "model-1.safetensors").rename(place / "model-9.safetensors")
    seen.append(weights_digest(str(place)))
    (place / "model-9.safetensors").unlink()
    seen.append(weights_digest(str(place)))
    with (place / "model-0.safetensors").open("ab") as file:
        file.write(b"x")
    seen.append(weights_digest(str(place)))
    assert len(set(seen)) == len(seen)


def test_few_samples_are_spread_over_all_files(place: Path) -> None:
    few = weights_digest(str(place), samples=8)
    data = bytearray((place / "model-2.safetensors").read_bytes())
    data[:100] = bytes(100)
    (place / "model-2.safetensors").write_bytes(data)
    assert weights_digest(str(place), samples=8) != few


def test_no_weights_have_no_digest(place: Path, tmp_path: Path) -> None:
    assert weights_digest(str(tmp_path)) is None
    assert weights_digest("org/model") is None
    assert adapter_digest("org/adapter") is None
    single = place / "model-0.safetensors"
    assert weights_digest(str(single)) == weights_digest(str(single))


def test_an_adapter_is_all_of_its_files(place: Path) -> None:
    digest, stamp = adapter_digest(str(place)), adapter_stamp(str(place))
    (place / "config.json").write_text('{"r": 8}')
    assert adapter_digest(str(place)) != digest
    assert adapter_stamp(str(place)) != stamp
