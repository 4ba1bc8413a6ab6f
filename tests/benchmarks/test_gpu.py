"""The GPU's benchmarks, run from end to end where there is none, and every line of them with a
torch that has no GPU: a name that torch does not have would cost a run on a GPU to find."""

from __future__ import annotations

import inspect
import json
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from time import perf_counter
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import gpu_copies, gpu_path
from benchmarks.gpu import drag, machine, shapes

CPU = ["--device", "cpu", "--rounds", "1"]


def measured(benchmark: ModuleType, out: Path, *options: str) -> dict[str, Any]:
    result: dict[str, Any] = benchmark.main([*CPU, *options, "--out", str(out)])
    assert json.loads(out.read_text()) == result
    return result


def test_copies_are_measured(tmp_path: Path) -> None:
    result = measured(gpu_copies, tmp_path / "results" / "copies.json")
    assert result["left_out"] == []
    parts = result["parts"]
    assert list(parts) == [
        "launch",
        "throughput, tiny, 128 tokens",
        "drag, matrix products, 128 tokens",
        "drag, decoding, 128 tokens",
        "drag, decoding with small copies, 128 tokens",
    ]
    # Rates, rounded: a machine that does much else may bring one of them to nothing.
    assert set(parts["throughput, tiny, 128 tokens"]["gb_per_s"]) == {
        *("saved", "loaded", "large_out", "large_in")
    }
    # How many end beside so few steps depends on what else the machine does.
    assert set(parts["drag, decoding, 128 tokens"]["saves"]) == {"ms", "slower", "gb_per_s"}
    assert parts["drag, decoding, 128 tokens"]["none"]["gb_per_s"] == 0
    assert {"save", "fence", "load", "poll"} <= set(parts["launch"])


def test_what_there_is_no_time_for_is_named(tmp_path: Path) -> None:
    result = measured(gpu_copies, tmp_path / "copies.json", "--seconds", "0")
    assert (result["parts"], len(result["left_out"])) == ({}, 5)


def test_the_path_from_a_bucket_is_measured(tmp_path: Path) -> None:
    (part,) = measured(gpu_path, tmp_path / "path.json")["parts"].values()
    assert set(part["gb_per_s"]) == {"network", "bus", "fetch", "path"}
    assert all(part["gb_per_s"].values())
    assert part["saved_gb_per_s"] > 0


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_path, "NEEDED", ("json", "no_such_package"))
    with pytest.raises(SystemExit, match="needs it: no_such_package"):
        gpu_path.main(CPU)


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self.at_s = 0.0

    def record(self) -> None:
        self.at_s = perf_counter()

    def synchronize(self) -> None:
        return

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end.at_s - self.at_s)


class Stream:
    def wait_stream(self, other: Stream) -> None:
        assert isinstance(other, Stream)


class Graph:
    """Captures nothing, and replays it."""

    def replay(self) -> None:
        return


def entered(thing: Any) -> AbstractContextManager[None]:
    return nullcontext()


DOUBLES: dict[str, Any] = {
    "Event": Event,
    "Stream": Stream,
    "CUDAGraph": Graph,
    "stream": entered,
    "graph": entered,
    "current_stream": Stream,
    "synchronize": lambda device: None,
    "get_device_properties": lambda device: SimpleNamespace(
        name="a GPU of paper", total_memory=1, multi_processor_count=2
    ),
}


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.cuda` as far as the benchmarks use it, and small models."""
    for name, instead in DOUBLES.items():
        assert hasattr(torch.cuda, name)
        monkeypatch.setattr(torch.cuda, name, instead)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    make = machine.Machine.__init__

    def on_paper(self: machine.Machine, device: str) -> None:
        make(self, "cpu")
        self.is_gpu = True

    monkeypatch.setattr(machine.Machine, "__init__", on_paper)
    monkeypatch.setattr(gpu_copies, "MODELS", (shapes.TINY,))
    monkeypatch.setattr(gpu_copies, "LLAMA_8B", shapes.TINY)
    monkeypatch.setattr(gpu_path, "LLAMA_8B", shapes.TINY)
    products, decoding = drag.products, drag.decoding
    monkeypatch.setattr(drag, "products", lambda m, size: products(m, 64))
    monkeypatch.setattr(drag, "decoding", lambda m, layers, width: decoding(m, 2, 64))


@pytest.mark.usefixtures("double")
def test_every_part_of_a_gpu_s_run_is_written() -> None:
    result = gpu_copies.main(["--rounds", "1", "--mib", "2"])
    assert result["device"] == "a GPU of paper"
    assert len(result["parts"]) == 1 + 4 + 3 * 2
    saved = {"save", "saves", "saved_of_large"}
    assert all(saved & part.keys() for part in result["parts"].values())
    path = gpu_path.main(["--rounds", "1", "--mib", "2"])
    assert len(path["parts"]) == 2
    assert path["device"] == "a GPU of paper"


def test_a_step_has_its_small_copies_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    copy = torch.Tensor.copy_

    def seen(to: torch.Tensor, source: torch.Tensor, *, non_blocking: bool) -> torch.Tensor:
        assert non_blocking
        made.append(f"{source.numel()} numbers")
        return copy(to, source)

    step = drag.with_small_copies(machine.Machine("cpu"), lambda: made.append("the graph"))
    monkeypatch.setattr(torch.Tensor, "copy_", seen)
    step()
    assert made == ["16384 numbers", "16384 numbers", "the graph", "256 numbers"]


def test_the_doubles_take_what_torch_s_take() -> None:
    """As far as torch can be asked without a GPU."""
    for name in ("synchronize", "current_stream", "get_device_properties", "graph", "stream"):
        inspect.signature(getattr(torch.cuda, name)).bind(object())
