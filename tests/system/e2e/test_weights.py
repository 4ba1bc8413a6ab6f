"""Weights and adapters that change behind the same name: nobody may get what others have made.

Every answer is compared with that of an engine without a connector that has the same files.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lab import models
from lab.engine import Ask, Engine
from lab.s3 import S3Server
from tests.system.e2e.conftest import (
    FLOAT32,
    START_AND_STOP_S,
    Rig,
    Serve,
    at_rest,
    cached,
    new_bucket,
    patient_for,
    tokens,
)

PROMPTS = models.prompts(3, 400, seed=11)
HIT = 3 * 128
LORA: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1, "max_cpu_loras": 2}
FAT: dict[str, Any] = FLOAT32 | {"max_model_len": 2_048}

# The first test starts all engines.
pytestmark = pytest.mark.timeout(3 * START_AND_STOP_S)

Loaded = tuple[str, int, str]
"""Name, number and path of an adapter."""
NUMBERS = itertools.count(1)
"""Of adapters and seeds. All tests share two engines, so none uses those of another."""


def asks(adapter: Loaded | None) -> list[Ask]:
    return [Ask(prompt, adapter=adapter) for prompt in PROMPTS]


def named(path: Path, number: int) -> Loaded:
    """The name is in vLLM's own hashes, so it is the same in both engines."""
    return (str(path), number, str(path))


def generated(engine: Engine, adapter: Loaded | None) -> tuple[list[list[int]], list[int | None]]:
    """Tokens, and how many of each prompt were cached, with nothing in the engine's own cache."""
    engine.reset_prefix_cache()
    answers = engine.generate(asks(adapter))
    at_rest(engine)
    return tokens(answers), cached(answers)


class Truth:
    """Answers of an engine without a connector, which loads what is in the files now."""

    def __init__(self, engine: Engine, directory: Path) -> None:
        self._engine = engine
        self._directory = directory

    def of(self, adapter: Path) -> list[list[int]]:
        """With the adapter that is in this directory now."""
        number = next(NUMBERS)
        copy = self._directory / f"adapter-{number}"
        shutil.copytree(adapter, copy)
        return tokens(self._engine.generate(asks(named(copy, number))))


@pytest.fixture(scope="module")
def truth(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Truth]:
    directory = tmp_path_factory.mktemp("truth")
    with Engine(tiny, log_path=directory / "truth.log", **LORA, **FLOAT32) as engine:
        yield Truth(engine, directory)


@dataclass(frozen=True)
class Lives:
    """Two engines on one bucket. before: saves what `after` finds there. connector: theirs."""

    connector: dict[str, Any]
    before: Engine
    after: Engine


@pytest.fixture(scope="module")
def lives(s3: S3Server, tiny: Path, serve: Serve) -> Iterator[Lives]:
    with new_bucket(s3) as bucket:
        connector = patient_for(s3, bucket)
        one, other = (serve(tiny, connector, **LORA, **FLOAT32) for _ in range(2))
        with one as before, other as after:
            yield Lives(connector, before, after)


def fresh(path: Path) -> int:
    """Put an adapter into the folder, over any there, with new weights. Returns their seed."""
    models.build_adapter(path, models.TINY, seed=(seed := next(NUMBERS)))
    return seed


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    fresh(path := tmp_path / "adapter")
    return path


def load(engine: Engine, adapter: Loaded, **how: Any) -> Loaded:
    """As vLLM's server does. Returns what requests name."""
    name, number, path = adapter
    engine.call("tests.system.e2e.inside:load_adapter", name=name, number=number, path=path, **how)
    return adapter


def loaded(engine: Engine, path: Path) -> Loaded:
    """What is in the folder now, as an adapter with a number of its own."""
    return load(engine, named(path, next(NUMBERS)))


def test_an_adapter_is_cached_from_its_second_request_or_its_load_on(
    adapter: Path, lives: Lives, truth: Truth
) -> None:
    """vLLM's server loads adapters before the first request, `LLM` with it. Other engines share
    what was saved, whatever number the adapter has there."""
    expected = truth.of(adapter)
    with_request = named(adapter, next(NUMBERS))
    assert generated(lives.before, with_request) == (expected, [0, 0, 0])
    # The first request has loaded it; the others were saved.
    assert generated(lives.before, with_request) == (expected, [0, HIT, HIT])
    assert generated(lives.after, loaded(lives.after, adapter)) == (expected, [HIT] * 3)
    assert generated(lives.after, None)[1] == [0, 0, 0], "without the adapter"


def test_a_setting_of_an_adapter_that_is_edited_makes_it_another(
    adapter: Path, lives: Lives, truth: Truth
) -> None:
    """`lora_alpha` from 16 to 64: the same path, the same length."""
    before = truth.of(adapter)
    assert generated(lives.before, loaded(lives.before, adapter))[0] == before
    config = adapter / "adapter_config.json"
    size = config.stat().st_size
    config.write_text(config.read_text().replace('"lora_alpha": 16', '"lora_alpha": 64'))
    assert config.stat().st_size == size
    after = truth.of(adapter)
    assert after != before
    edited = loaded(lives.after, adapter)
    assert generated(lives.after, edited) == (after, [0, 0, 0])
    assert generated(lives.after, edited) == (after, [HIT] * 3)


@pytest.mark.parametrize(
    "how", ["in place", pytest.param("by renaming", marks=pytest.mark.nightly)]
)
def test_files_replaced_between_the_load_and_the_first_request(
    adapter: Path, lives: Lives, truth: Truth, how: str
) -> None:
    """What is saved is kept under what was loaded, not under what is in the directory by then."""
    old = truth.of(adapter)
    at_first = loaded(lives.before, adapter)
    if how == "in place":
        fresh(adapter)
    else:
        fresh(other := adapter.parent / "other")
        for file in other.iterdir():
            file.rename(adapter / file.name)
    assert generated(lives.before, at_first) == (old, [0, 0, 0])
    assert generated(lives.before, at_first) == (old, [HIT] * 3)
    new = truth.of(adapter)
    assert new != old
    assert generated(lives.after, loaded(lives.after, adapter)) == (new, [0, 0, 0])


@pytest.mark.long
@pytest.mark.parametrize(
    "how",
    [
        "in place",
        pytest.param("unloaded", marks=pytest.mark.nightly),
        pytest.param("evicted", marks=pytest.mark.nightly),
    ],
)
def test_an_adapter_that_is_loaded_again_with_other_content(
    rig: Rig, adapter: Path, lives: Lives, truth: Truth, how: str
) -> None:
    """Under the same name and path, so that vLLM's own cache holds both. The engine answers as
    one without a connector would; others get nothing wrong, with the old files or new."""
    first, old = fresh(adapter), truth.of(adapter)
    same = loaded(lives.before, adapter)
    assert generated(lives.before, same)[0] == old
    fresh(adapter)
    new = truth.of(adapter)
    assert new != old
    if how == "unloaded":
        lives.before.call("tests.system.e2e.inside:unload_adapter", number=same[1])
    if how == "evicted":
        for number in range(LORA["max_cpu_loras"]):
            fresh(other := rig.tmp_path / f"{number}")
            loaded(lives.before, other)
    else:
        load(lives.before, same, in_place=how == "in place")
    for _ in range(2):
        assert generated(lives.before, same) == (new, [0, 0, 0])
    with rig.serve(rig.tiny, lives.connector, **LORA, **FLOAT32) as third:
        assert generated(third, loaded(third, adapter)) == (new, [0, 0, 0])
    models.build_adapter(adapter, models.TINY, seed=first)
    assert generated(lives.after, loaded(lives.after, adapter)) == (old, [HIT] * 3)


@pytest.mark.long
def test_one_number_for_two_adapters_is_not_cached_under_the_wrong_name(
    adapter: Path, tmp_path: Path, lives: Lives, truth: Truth
) -> None:
    """vLLM takes what is loaded under the number, whatever the request's name says."""
    fresh(other := tmp_path / "other")
    expected = truth.of(other)
    _, number, _ = loaded(lives.before, adapter)
    assert generated(lives.before, named(other, number))[0] != expected
    assert generated(lives.after, loaded(lives.after, other)) == (expected, [0, 0, 0])


def normalised_anew(model: Path) -> None:
    """Change all `input_layernorm`s in place, and nothing else."""
    file = model / "model.safetensors"
    size = file.stat().st_size
    weights = load_file(file)
    weights = {name: tensor.clone() for name, tensor in weights.items()}
    generator = torch.Generator().manual_seed(5)
    for name, tensor in weights.items():
        if name.endswith("input_layernorm.weight"):
            noise = torch.rand(tensor.shape, generator=generator)
            weights[name] = (0.2 + 2 * noise).to(tensor.dtype)
    save_file(weights, file, metadata={"format": "pt"})
    assert file.stat().st_size == size


def test_weights_of_which_few_tensors_change_are_others(rig: Rig, fat: Path) -> None:
    model = rig.tmp_path / "model"
    shutil.copytree(fat, model)
    with rig.serve(model, rig.patient, **FAT) as engine:
        engine.generate(asks(None))
    normalised_anew(model)
    with Engine(model, log_path=rig.tmp_path / "truth.log", **FAT) as engine:
        expected = tokens(engine.generate(asks(None)))
    with rig.serve(model, rig.patient, **FAT) as engine:
        assert generated(engine, None) == (expected, [0, 0, 0])
        assert generated(engine, None) == (expected, [HIT] * 3)
