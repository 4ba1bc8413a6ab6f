"""What doctor says of what is installed."""

from __future__ import annotations

import importlib.util
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from s3kv.cli.doctor import software

ROOT = Path(__file__).resolve().parents[3]


def test_the_range_is_that_of_the_package() -> None:
    first, end = (".".join(map(str, bound)) for bound in software.SUPPORTED)
    assert f'"vllm>={first},<{end}",' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize(
    ("version", "status"),
    [
        (None, "skipped"),
        ("0.28.9", "fault"),
        ("0.29.0", "ok"),
        ("0.33.1rc1", "ok"),
        ("0.34.0", "fault"),
        ("1.0", "fault"),
        ("dev", "warning"),
    ],
)
def test_versions(version: str | None, status: str) -> None:
    finding = software.examine_vllm(version)
    assert finding.status == status
    assert ("pip install" in finding.remedy) == (status in ("fault", "warning"))


def test_the_version_that_is_here() -> None:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    import vllm

    version = software.vllm_version()
    assert version is not None
    assert vllm.__version__.startswith(version.partition("+")[0])


def test_no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert software.vllm_version() is None


H200 = {
    "torch": "2.13.0",
    "cuda": "13.0",
    "device": "NVIDIA H200",
    "wanted_bytes": 64,
    "pinned_bytes": 64,
    "where": "on NUMA node 1, that of GPU 0000:5e:00.0",
    "refusal": "",
    "remedy": "",
}
REFUSED = {
    "pinned_bytes": 0,
    "refusal": "cudaErrorMemoryAllocation (2)",
    "remedy": "set host_bytes",
}


@pytest.mark.parametrize(
    ("found", "status", "remedy"),
    [
        ("torch is not installed", "skipped", ""),
        (H200, "ok", ""),
        (H200 | REFUSED, "warning", "set host_bytes"),
        (H200 | {"device": None}, "warning", "nvidia-smi"),
        (H200 | {"device": None, "cuda": None}, "ok", ""),
    ],
)
def test_gpus(found: dict[str, Any] | str, status: str, remedy: str) -> None:
    finding = software.examine_gpu(found)
    assert finding.status == status
    assert remedy in finding.remedy
    assert bool(finding.remedy) == (status == "warning")


def test_where_memory_is_pinned_is_told() -> None:
    assert software.examine_gpu(H200).detail.endswith("on NUMA node 1, that of GPU 0000:5e:00.0")


def test_a_refusal_to_pin_is_told_with_its_reason() -> None:
    assert "cudaErrorMemoryAllocation (2)" in software.examine_gpu(H200 | REFUSED).detail


@pytest.mark.parametrize(
    ("found", "pinned"),
    [("not looked at", None), (H200 | {"device": None}, None), (H200, 64), (H200 | REFUSED, 0)],
)
def test_what_was_pinned(found: dict[str, Any] | str, pinned: int | None) -> None:
    assert software.pinned_bytes(found) == pinned


def test_torch_is_asked_in_a_process_of_its_own() -> None:
    torch = pytest.importorskip("torch")
    found = software.look_for_gpu()
    assert not isinstance(found, str), found
    assert found["torch"] == torch.__version__
    assert (found["device"] is None) == (not torch.cuda.is_available())


def test_torch_that_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = (sys.executable, "-c", "raise SystemExit('libcudart.so.13: cannot open')")
    monkeypatch.setattr(software, "_PROBE", broken)
    assert software.look_for_gpu() == "torch cannot be asked: libcudart.so.13: cannot open"


def test_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "not installed" in str(software.look_for_gpu())
