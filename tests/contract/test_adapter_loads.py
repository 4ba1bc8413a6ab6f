"""A worker's reports on the adapters (LoRA) that it has loaded.

The loads go through vLLM's own `WorkerLoRAManager._load_adapter`, whose inside is replaced.
"""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

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
    """Instead of vLLM's function: it reads the files while `meanwhile` happens."""
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


def test_loaded_adapters_are_reported_by_content(rank: Rank, adapter: Path, tmp_path: Path) -> None:
    assert rank.step().by_id == {}
    same = Path(shutil.copytree(adapter, tmp_path / "same"))
    loads = [("a", 1, adapter), ("b", 2, same), ("c", 3, write(tmp_path / "other", alpha=64))]
    for load in loads:
        rank.manager.load(*load)
    rank.manager.load("d", 4, adapter, is_3d_lora_weight=True)  # read in another way
    found = rank.step().by_id
    for name, number, path in loads:
        assert found[number].name == hashed_name(LoRARequest(name, number, str(path)))
    assert found[1].digest == found[2].digest
    assert len({found[number].digest for number in (2, 3, 4)}) == 3
    write(adapter, b"retrained")
    assert rank.step().by_id == found, "files that change later change nothing"
    shutil.rmtree(adapter)
    rank.manager.drop(2)
    assert rank.step().by_id == {number: found[number] for number in (1, 3, 4)}


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
    for _ in range(2):
        write(adapter)
        rank.manager.load("a", 1, adapter)
        assert rank.step().by_id == {}
    assert caplog.text.count("does not cache requests with the adapter 'a'") == 1, "logged once"
    rank.manager.meanwhile = lambda: None
    write(adapter)
    rank.manager.load("a", 1, adapter)
    assert rank.step().by_id == {}, "vLLM may still hold KV of the first load"


def test_an_adapter_that_fails_to_load_is_not_reported(rank: Rank, adapter: Path) -> None:
    rank.manager.meanwhile = Mock(side_effect=ValueError("no such module"))
    with pytest.raises(ValueError, match="no such module"):
        rank.manager.load("a", 1, adapter)
    with pytest.raises(FileNotFoundError):
        rank.manager.load("b", 2, "org/adapter")
    assert rank.step().by_id == {}


def test_loaded_tensors_are_not_those_of_the_file(
    rank: Rank, adapter: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = rank.manager.load("a", 1, adapter)
    rank.manager.weights.fill_(1)
    assert model.loras["q_proj"].lora_a.tolist() == [0] * 4
    rank.manager.weights = [torch.zeros(4)]  # type: ignore[assignment]
    rank.manager.load("b", 2, adapter)
    assert set(rank.step().by_id) == {1}
    assert "may still be those of its files" in caplog.text


def test_another_content_under_a_name_ends_it(
    rank: Rank, adapter: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Until the scheduler has the report, nothing that it plans may be saved."""
    other = write(tmp_path / "other", b"other")
    rank.manager.load("a", 1, adapter)
    rank.manager.load("o", 2, other)
    rank.step()
    assert rank.loads.may_save
    rank.manager.load("a", 1, adapter)
    assert rank.loads.may_save, "the same again"
    assert set(rank.step().by_id) == {1, 2}
    write(adapter, b"retrained")
    rank.manager.load("a", 1, adapter)
    assert "Load changed weights under a new name" in caplog.text
    assert not rank.loads.may_save
    assert set(rank.step().by_id) == {2}
    reported_in = rank.number
    rank.step(reported=reported_in - 1)
    assert not rank.loads.may_save, "planned before the scheduler could know"
    rank.step(reported=reported_in)
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
    found = rank.step().by_id
    if hashed_name(LoRARequest("a", 1, str(other))) == hashed_name(LoRARequest("a", 1, "/")):
        assert found == {}, "vLLM hashes adapters by name alone, and has one for two of them"
        return
    assert found[1].name == hashed_name(LoRARequest("a", 1, str(other)))
    rank.manager.load("a", 2, adapter)
    assert set(rank.step().by_id) == {1}


def test_adapted_images_are_shared_by_bare_name(read: None, adapter: Path, tmp_path: Path) -> None:
    rank = Rank(enable_tower_connector_lora=True)
    rank.manager.load("a", 1, adapter)
    rank.manager.load("a", 2, write(tmp_path / "other", b"other"))
    assert rank.step().by_id == {}


def test_engines_in_one_process_are_told_apart(rank: Rank, adapter: Path) -> None:
    second = Rank()
    second.manager.load("a", 1, adapter)
    Manager(SimpleNamespace()).load("a", 1, adapter)
    assert rank.step().by_id == {}
    assert set(second.step().by_id) == {1}


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


def test_only_adapters_that_all_ranks_report_count() -> None:
    one, two = LoadedAdapter("a", b"1"), LoadedAdapter("b", b"2")
    report = AdapterReport(4, {1: one, 2: two, 3: one})
    report.merge(AdapterReport(3, {1: one, 2: one}))
    assert report == AdapterReport(3, {1: one})


def test_a_report_like_the_last_one_is_neither_packed_nor_unpacked_again() -> None:
    """Every rank sends one in every step, and an engine may have hundreds of adapters."""
    adapters = {number: LoadedAdapter(f"a{number}", b"1") for number in (2, 1)}
    first, again, other = (
        pickle.loads(pickle.dumps(AdapterReport(number, dict(found))))
        for number, found in enumerate([adapters, adapters, {1: LoadedAdapter("a1", b"2")}])
    )
    assert first == AdapterReport(0, adapters)
    assert other == AdapterReport(2, {1: LoadedAdapter("a1", b"2")})
    assert all(again.by_id[number] is first.by_id[number] for number in adapters)
    again.merge(other)
    assert (again.by_id, first.by_id) == ({}, adapters)
