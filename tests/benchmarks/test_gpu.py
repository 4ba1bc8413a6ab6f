"""The GPU's benchmarks run from end to end where there is none, and write as they go."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks import gpu_busy, gpu_copies, gpu_path

CPU = ["--device", "cpu", "--rounds", "1"]


def measured(benchmark: ModuleType, out: Path, *options: str) -> dict[str, Any]:
    """The result, which is also written."""
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


def test_copies_beside_a_busy_thread_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_busy, "QUEUED", 4)
    result = measured(gpu_busy, tmp_path / "busy.json")
    assert result["left_out"] == []
    parts = result["parts"]
    assert parts["fence"]["queued"] == 4
    assert parts["fence"]["behind_ms"]["least"] <= parts["fence"]["all_ms"]["most"]
    assert set(parts["launch"]) == {"alone_us", "beside_busy_us"}
    assert all(each["rounds_per_s"]["median"] for each in parts["thread"].values())
    assert parts["thread"]["none"]["slower"] == 0


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_path, "NEEDED", ("json", "no_such_package"))
    with pytest.raises(SystemExit, match="needs it: no_such_package"):
        gpu_path.main(CPU)
