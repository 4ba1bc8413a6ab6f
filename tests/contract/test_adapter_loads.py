"""What a worker reports of the adapters (LoRA) that it has loaded.

The loads go through vLLM's own `WorkerLoRAManager._load_adapter`; what it does inside is replaced.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import WorkerLoRAManager

from s3kv.connectors.adapter_loads import (
    AdapterLoads,
    AdapterReport,
    AdapterStep,
    LoadedAdapter,
    hashed_name,
)
from s3kv.connectors.weights import SAMPLED


class Manager(WorkerLoRAManager):
    """vLLM's, but for the model that an adapter would be made for."""

    def __init__(self, lora_config: Any) -> None:
        self.lora_config = lora_config
        self.meanwhile: Callable[[], object] = lambda: None
        self.weights = torch.zeros(4)
        self._here: set[int] = set()
        self._adapter_manager = SimpleNamespace(  # type: ignore[assignment]
            list_adapters=lambda: dict.fromkeys(self._here)
        )

    def load(self, name: str, number: int, path: Path | str, **how: Any) -> Any:
        model = self._load_adapter(LoRARequest(name, number, str(path), **how))
        self._here.add(number)
        return model

    def drop(self, number: int) -> None:
        self._here.discard(number)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of what vLLM's function does: it reads the files while `meanwhile` happens."""
    # The wrapper is put around the replacement, and goes with it.
    monkeypatch.setattr(WorkerLoRAManager, "_load_adapter", _load_adapter)


def _load_adapter(self: Any, lora_request: LoRARequest) -> Any:
    Path(lora_request.lora_path, "adapter_model.safetensors").read_bytes()
    self.meanwhile()
    layer = SimpleNamespace(lora_a=self.weights, lora_b=self.weights)
    return SimpleNamespace(loras={"q_proj": layer})


@pytest.fixture
def rank(read: None) -> Rank:
    return Rank()


class Rank:
    """A worker: its loads and steps."""

    def __init__(self, **config: Any) -> None:
        self.config = SimpleNamespace(**config)
        self.loads = AdapterLoads(self.config, SAMPLED)  # type: ignore[arg-type]
        self.manager = Manager(self.config)
        self.number = 0

    def step(self, *, reported: int | None = None) -> AdapterReport:
        """A step that is planned with the reports up to `reported`, or with all before."""
        self.number += 1
        last = self.number - 1 if reported is None else reported
        self.loads.begin(AdapterStep(self.number, last))
        return self.loads.report()


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return write(tmp_path / "adapter")


def write(place: Path, content: bytes = b"weights", alpha: int = 16) -> Path:
    place.mkdir(exist_ok=True)
    (place / "adapter_model.safetensors").write_bytes(content)
    (place / "adapter_config.json").write_text(f'{{"lora_alpha": {alpha}}}')
    return place


def test_what_is_loaded_is_told_by_content(rank: Rank, adapter: Path, tmp_path: Path) -> None:
    assert rank.step().by_id == {}
    same = Path(shutil.copytree(adapter, tmp_path / "same"))
    rank.manager.load("a", 1, adapter)
    rank.manager.load("b", 2, same)
    rank.manager.load("c", 3, write(tmp_path / "other", alpha=64))
    told = rank.step().by_id
    assert [told[n].name for n in (1, 2, 3)] == [
        hashed_name(LoRARequest(name, number, str(path)))
        for name, number, path in (("a", 1, adapter), ("b", 2, same), ("c", 3, tmp_path / "other"))
    ]
    assert told[1].digest == told[2].digest != told[3].digest
    rank.manager.drop(2)
    assert set(rank.step().by_id) == {1, 3}, "only what is loaded now"


def test_how_vllm_is_told_to_read_the_files_counts(read: None, adapter: Path) -> None:
    digests = set()
    for fused in (False, True):
        rank = Rank()
        rank.manager.load("a", 1, adapter, is_3d_lora_weight=fused)
        digests.add(rank.step().by_id[1].digest)
    assert len(digests) == 2


def test_files_that_change_later_change_nothing(rank: Rank, adapter: Path) -> None:
    rank.manager.load("a", 1, adapter)
    before = rank.step().by_id
    write(adapter, b"retrained")
    assert rank.step().by_id == before
    shutil.rmtree(adapter)
    assert rank.step().by_id == before


@pytest.mark.parametrize(
    "change",
    [
        lambda place: write(place, b"WEIGHTS"),
        lambda place: write(place, alpha=64),
        lambda place: (place / "more").write_text(""),
        lambda place: shutil.rmtree(place),
        lambda place: (place / "adapter_model.safetensors").touch(),
    ],
    ids=["weights", "setting", "another file", "gone", "written again"],
)
def test_files_that_change_during_the_load_are_of_unknown_content(
    rank: Rank, adapter: Path, change: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    rank.manager.meanwhile = lambda: change(adapter)
    with caplog.at_level(logging.WARNING, "s3kv"):
        rank.manager.load("a", 1, adapter)
    assert rank.step().by_id == {}
    assert "does not cache requests with the adapter 'a'" in caplog.text
    rank.manager.meanwhile = lambda: None
    write(adapter)
    rank.manager.load("a", 1, adapter)
    assert rank.step().by_id == {}, "vLLM may still hold KV of the first load"


def test_what_fails_to_load_is_not_loaded(rank: Rank, adapter: Path) -> None:
    def fail() -> None:
        raise ValueError("no such module")

    rank.manager.meanwhile = fail
    with pytest.raises(ValueError, match="no such module"):
        rank.manager.load("a", 1, adapter)
    with pytest.raises(FileNotFoundError):
        rank.manager.load("b", 2, "org/adapter")
    assert rank.step().by_id == {}


def test_loaded_tensors_are_not_those_of_the_file(rank: Rank, adapter: Path) -> None:
    model = rank.manager.load("a", 1, adapter)
    rank.manager.weights.fill_(1)
    assert model.loras["q_proj"].lora_a.tolist() == [0] * 4
    assert set(rank.step().by_id) == {1}


def test_unknown_ways_of_loading_are_of_unknown_content(
    rank: Rank, adapter: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rank.manager.weights = [torch.zeros(4)]  # type: ignore[assignment]
    rank.manager.load("a", 1, adapter)
    assert rank.step().by_id == {}
    assert "may still be those of its files" in caplog.text


def test_another_content_under_a_name_ends_it(
    rank: Rank, adapter: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Until the scheduler has heard of it, nothing that it plans may be saved."""
    other = write(tmp_path / "other", b"other")
    rank.manager.load("a", 1, adapter)
    rank.manager.load("o", 2, other)
    rank.step()
    assert rank.loads.may_save
    rank.manager.load("a", 1, adapter)
    assert rank.loads.may_save, "the same again"
    assert set(rank.step().by_id) == {1, 2}
    write(adapter, b"retrained")
    with caplog.at_level(logging.WARNING, "s3kv"):
        rank.manager.load("a", 1, adapter)
    assert "Load changed weights under a new name" in caplog.text
    assert not rank.loads.may_save
    assert set(rank.step().by_id) == {2}
    told_in = rank.number
    rank.step(reported=told_in - 1)
    assert not rank.loads.may_save, "planned before the scheduler could know"
    rank.step(reported=told_in)
    assert rank.loads.may_save
    write(adapter)
    rank.manager.load("a", 9, adapter)
    assert set(rank.step().by_id) == {2}, "not even with the old content again"


def test_another_adapter_under_a_number_ends_the_one_before(
    rank: Rank, adapter: Path, tmp_path: Path
) -> None:
    """Requests of that one may still run, and are computed with the new one."""
    other = write(tmp_path / "other", b"other")
    rank.manager.load("a", 1, adapter)
    rank.step()
    rank.manager.load("a", 1, other, load_inplace=True)
    assert not rank.loads.may_save
    told = rank.step().by_id
    if hashed_name(LoRARequest("a", 1, str(other))) == hashed_name(LoRARequest("a", 1, "/")):
        assert told == {}, "vLLM hashes adapters by name alone, and has one for two of them"
        return
    assert told[1].name == hashed_name(LoRARequest("a", 1, str(other)))
    rank.manager.load("a", 2, adapter)
    assert set(rank.step().by_id) == {1}


def test_adapted_images_are_shared_by_bare_name(read: None, adapter: Path, tmp_path: Path) -> None:
    rank = Rank(enable_tower_connector_lora=True)
    rank.manager.load("a", 1, adapter)
    rank.manager.load("a", 2, write(tmp_path / "other", b"other"))
    assert rank.step().by_id == {}


def test_engines_in_one_process_do_not_meet(rank: Rank, adapter: Path) -> None:
    second = Rank()
    second.manager.load("a", 1, adapter)
    assert rank.step().by_id == {}
    assert set(second.step().by_id) == {1}
    stranger = Manager(SimpleNamespace())
    stranger.load("a", 1, adapter)
    assert rank.step().by_id == {}


@pytest.mark.parametrize("gone", ["_load_adapter", "list_adapters", "parameters"])
def test_another_vllm_has_no_cache_for_adapters(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, gone: str
) -> None:
    if gone == "parameters":
        monkeypatch.setattr(WorkerLoRAManager, "_load_adapter", lambda self, path: None)
    else:
        if gone == "list_adapters":
            monkeypatch.setattr(WorkerLoRAManager, "_load_adapter", _load_adapter)
        monkeypatch.delattr(WorkerLoRAManager, gone)
    loads = AdapterLoads(SimpleNamespace(), SAMPLED)  # type: ignore[arg-type]
    assert "this version of vLLM loads them in a way" in caplog.text
    loads.begin(AdapterStep(3, 2))
    assert loads.report() == AdapterReport(3)


def test_all_ranks_have_to_say_the_same() -> None:
    one, two = LoadedAdapter("a", b"1"), LoadedAdapter("b", b"2")
    report = AdapterReport(4, {1: one, 2: two, 3: one})
    report.merge(AdapterReport(3, {1: one, 2: one}))
    assert report == AdapterReport(3, {1: one})
