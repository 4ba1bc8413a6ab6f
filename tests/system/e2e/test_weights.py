"""Weights and adapters that change behind the same name: nobody may get what others have made.

Every answer is compared with that of an engine without a connector that has the same files.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lab import models
from lab.engine import Ask, Engine
from tests.system.e2e.conftest import Rig, Serve, at_rest, cached, tokens

PROMPTS = models.prompts(3, 400, seed=11)
HIT = 3 * 128
LORA: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1, "max_cpu_loras": 2}
# Where the length of a hit does not matter.
EXACT: dict[str, Any] = {"dtype": "float32"}
FAT: dict[str, Any] = EXACT | {"max_model_len": 2_048}

Adapter = tuple[str, int, str]


def asks(adapter: Adapter | None) -> list[Ask]:
    return [Ask(prompt, adapter=adapter) for prompt in PROMPTS]


def named(path: Path, name: str = "a", number: int = 1) -> Adapter:
    return (name, number, str(path))


def generated(engine: Engine, adapter: Adapter | None) -> tuple[list[list[int]], list[int | None]]:
    """Tokens, and how many of each prompt were cached, with nothing in the engine's own cache."""
    engine.reset_prefix_cache()
    answers = engine.generate(asks(adapter))
    at_rest(engine)
    return tokens(answers), cached(answers)


class Truth:
    """Answers of engines without a connector, each of which has loaded what is in the files now."""

    def __init__(self, model: Path, directory: Path) -> None:
        self._model = model
        self._directory = directory
        self._engine: Engine | None = None
        self._loaded = 100

    def of(self, adapter: Path) -> list[list[int]]:
        """With the adapter that is in this directory now."""
        self._loaded += 1
        copy = self._directory / f"adapter-{self._loaded}"
        shutil.copytree(adapter, copy)
        if self._engine is None:
            log = self._directory / "truth.log"
            self._engine = Engine(self._model, log_path=log, **LORA, **EXACT)
            self._engine.start()
        return tokens(self._engine.generate(asks(named(copy, f"t{self._loaded}", self._loaded))))

    def close(self) -> None:
        if self._engine is not None:
            self._engine.kill()


@pytest.fixture(scope="module")
def truth(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    truth = Truth(tiny, tmp_path_factory.mktemp("truth"))
    yield truth
    truth.close()


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return models.build_adapter(tmp_path / "adapter", models.TINY)


def load(engine: Engine, adapter: Adapter, **how: Any) -> None:
    name, number, path = adapter
    engine.call("tests.system.e2e.inside:load_adapter", name=name, number=number, path=path, **how)


def test_an_adapter_is_cached_from_its_second_request_or_its_load_on(
    tiny: Path, adapter: Path, patient: dict[str, Any], serve: Serve, truth: Truth
) -> None:
    """vLLM's server loads adapters before the first request, `LLM` with it. Other engines share
    what was saved, whatever number the adapter has there."""
    expected = truth.of(adapter)
    with serve(tiny, patient, **LORA, **EXACT) as engine:
        assert generated(engine, named(adapter)) == (expected, [0, 0, 0])
        # The first request has loaded it; the others were saved.
        assert generated(engine, named(adapter)) == (expected, [0, HIT, HIT])
    with serve(tiny, patient, **LORA, **EXACT) as engine:
        load(engine, named(adapter, number=7))
        assert generated(engine, named(adapter, number=7)) == (expected, [HIT] * 3)
        assert generated(engine, None)[1] == [0, 0, 0], "without the adapter"


def test_a_setting_of_an_adapter_that_is_edited_makes_it_another(
    tiny: Path, adapter: Path, patient: dict[str, Any], serve: Serve, truth: Truth
) -> None:
    """`lora_alpha` from 16 to 64: the same path, the same length."""
    before = truth.of(adapter)
    with serve(tiny, patient, **LORA, **EXACT) as engine:
        load(engine, named(adapter))
        assert generated(engine, named(adapter))[0] == before
    config = adapter / "adapter_config.json"
    size = config.stat().st_size
    config.write_text(config.read_text().replace('"lora_alpha": 16', '"lora_alpha": 64'))
    assert config.stat().st_size == size
    after = truth.of(adapter)
    assert after != before
    with serve(tiny, patient, **LORA, **EXACT) as engine:
        load(engine, named(adapter))
        assert generated(engine, named(adapter)) == (after, [0, 0, 0])
        assert generated(engine, named(adapter)) == (after, [HIT] * 3)


@pytest.mark.parametrize(
    "how", ["in place", pytest.param("by renaming", marks=pytest.mark.nightly)]
)
def test_files_replaced_between_the_load_and_the_first_request(
    tiny: Path, adapter: Path, patient: dict[str, Any], serve: Serve, truth: Truth, how: str
) -> None:
    """What is saved is kept under what was loaded, not under what is in the directory by then."""
    old = truth.of(adapter)
    with serve(tiny, patient, **LORA, **EXACT) as engine:
        load(engine, named(adapter))
        if how == "in place":
            models.build_adapter(adapter, models.TINY, seed=1)
        else:
            fresh = models.build_adapter(adapter.parent / "fresh", models.TINY, seed=1)
            for file in fresh.iterdir():
                file.rename(adapter / file.name)
        assert generated(engine, named(adapter)) == (old, [0, 0, 0])
        assert generated(engine, named(adapter)) == (old, [HIT] * 3)
    new = truth.of(adapter)
    assert new != old
    with serve(tiny, patient, **LORA, **EXACT) as engine:
        load(engine, named(adapter))
        assert generated(engine, named(adapter)) == (new, [0, 0, 0])


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
    rig: Rig, adapter: Path, truth: Truth, how: str
) -> None:
    """Under the same name and path, so that vLLM's own cache holds both. The engine answers as
    one without a connector would; engines after it get nothing wrong, with the old files or new."""
    old = truth.of(adapter)
    others = [models.build_adapter(rig.tmp_path / f"{n}", models.TINY, seed=n) for n in (2, 3)]
    with rig.serve(rig.tiny, rig.patient, **LORA, **EXACT) as engine:
        load(engine, named(adapter))
        assert generated(engine, named(adapter))[0] == old
        models.build_adapter(adapter, models.TINY, seed=1)
        new = truth.of(adapter)
        assert new != old
        if how == "unloaded":
            engine.call("tests.system.e2e.inside:unload_adapter", number=1)
        if how == "evicted":
            for number, other in enumerate(others, 2):
                load(engine, named(other, f"o{number}", number))
        else:
            load(engine, named(adapter), in_place=how == "in place")
        for _ in range(2):
            assert generated(engine, named(adapter)) == (new, [0, 0, 0])
    for seed, expected, hit in ((1, new, 0), (0, old, HIT)):
        models.build_adapter(adapter, models.TINY, seed=seed)
        with rig.serve(rig.tiny, rig.patient, **LORA, **EXACT) as engine:
            load(engine, named(adapter))
            assert generated(engine, named(adapter)) == (expected, [hit] * 3)


@pytest.mark.long
def test_one_number_for_two_adapters_is_not_cached_under_the_wrong_name(
    rig: Rig, adapter: Path, truth: Truth
) -> None:
    """vLLM takes what is loaded under the number, whatever the request's name says."""
    other = models.build_adapter(rig.tmp_path / "other", models.TINY, seed=1)
    expected = truth.of(other)
    with rig.serve(rig.tiny, rig.patient, **LORA, **EXACT) as engine:
        load(engine, named(adapter))
        assert generated(engine, named(other, "b", 1))[0] != expected
    with rig.serve(rig.tiny, rig.patient, **LORA, **EXACT) as engine:
        load(engine, named(other, "b", 1))
        assert generated(engine, named(other, "b", 1)) == (expected, [0, 0, 0])


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
