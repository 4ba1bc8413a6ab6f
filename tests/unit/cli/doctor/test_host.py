"""Findings on this host: looked at for real, judged as a table."""

from __future__ import annotations

import importlib.util
import mmap
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import vllm_s3kv
from s3kv.cli.doctor import host
from s3kv.cli.doctor.findings import Finding
from s3kv.cli.doctor.host import Host, examine, look
from s3kv.config import Config
from s3kv.host.limits import MemoryLimits
from tests.project import ROOT

GIB = 2**30
H200 = {
    "torch": "2.13.0", "cuda": "13.0", "device": "NVIDIA H200",
    "wanted_bytes": 64, "pinned_bytes": 64, "where": "on NUMA node 1, that of GPU 0000:5e:00.0",
    "refusal": "", "remedy": "",
}  # fmt: skip
REFUSED = {
    "pinned_bytes": 0, "refusal": "cudaErrorMemoryAllocation (2)", "remedy": "set host_bytes"
}  # fmt: skip
NO_GPU = H200 | {"device": None}


def pinned(nbytes: int) -> dict[str, Any]:
    return H200 | {"pinned_bytes": nbytes}


FINE = Host(
    available_bytes=16 * GIB, slab_error="", shm_bytes=8 * GIB, memlock_bytes=None,
    hash_seed="0", vllm="0.32.0", decoded_bytes_per_s=2.5e9, gpu=H200,
    left=Finding("killed engines", "ok", ""),
)  # fmt: skip


def judged(facts: Host, *, compress: Any = "auto", **options: Any) -> Mapping[str, Finding]:
    config = Config(bucket="bkt", host_bytes=4 * GIB, compress=compress)
    found = examine(config, facts, **{"workers": 1, "algorithm": "sha256", **options})
    return {finding.check: finding for finding in found}


def test_all_is_well() -> None:
    assert {finding.status for finding in judged(FINE, workers=4).values()} == {"ok"}


@pytest.mark.parametrize(
    ("change", "options", "check", "status", "remedy"),
    [
        ({"available_bytes": 4 * GIB - 1}, {}, "memory", "fault", "set host_bytes lower"),
        ({"available_bytes": 4 * GIB}, {}, "memory", "ok", ""),
        ({}, {"workers": 5}, "memory", "fault", "set host_bytes lower"),
        ({"decoded_bytes_per_s": None}, {}, "compression", "ok", ""),
        ({"decoded_bytes_per_s": None}, {"compress": "on"}, "compression", "fault", "pip install"),
        ({"slab_error": "forbidden"}, {}, "memory", "fault", "allow memfd_create"),
        ({"shm_bytes": None}, {}, "shm", "ok", ""),
        ({"shm_bytes": None}, {"workers": 2}, "shm", "fault", "docker run --shm-size"),
        ({"shm_bytes": 64 * 2**20}, {"workers": 2}, "shm", "warning", "docker run --shm-size"),
        ({"slab_error": "forbidden"}, {"tier_bytes": 8 * GIB}, "memory", "ok", ""),
        ({}, {"tier_bytes": 17 * GIB}, "memory", "fault", "set cpu_bytes_to_use lower"),
        ({}, {"tier_bytes": 0}, "memory", "warning", "give --config all of --kv-transfer-config"),
        ({}, {"tier_bytes": 8 * GIB}, "shm", "ok", ""),
        ({}, {"tier_bytes": 8 * GIB, "workers": 2}, "shm", "warning", "docker run --shm-size"),
        ({}, {"tier_bytes": 8 * GIB + 1}, "shm", "fault", "docker run --shm-size"),
        ({"memlock_bytes": 5 * GIB}, {"tier_bytes": 8 * GIB}, "memlock", "warning", "ulimit -l"),
        ({"memlock_bytes": 8 * 2**20}, {}, "memlock", "warning", "ulimit -l unlimited"),
        ({"memlock_bytes": 8 * 2**20, "gpu": NO_GPU}, {}, "memlock", "ok", ""),
        ({"memlock_bytes": 8 * 2**20, "gpu": "not looked at"}, {}, "memlock", "ok", ""),
        ({"memlock_bytes": 8 * 2**20, "gpu": pinned(2**26)}, {}, "memlock", "ok", ""),
        ({"memlock_bytes": 2**27, "gpu": pinned(2**26)}, {}, "memlock", "warning", "ulimit -l"),
        ({"memlock_bytes": 4 * GIB}, {}, "memlock", "ok", ""),
        ({"hash_seed": None}, {}, "hash seed", "ok", ""),
        ({"hash_seed": "random"}, {}, "hash seed", "warning", "unset it"),
        ({"hash_seed": None}, {"algorithm": "xxhash"}, "hash seed", "fault", "or use sha256_cbor"),
        ({"hash_seed": "0"}, {"algorithm": "xxhash_cbor"}, "hash seed", "ok", ""),
        ({"vllm": "0.30.9"}, {}, "vllm", "fault", "pip install 'vllm>="),
        ({"vllm": "0.31.0"}, {}, "vllm", "ok", ""),
        ({"vllm": "0.1.dev1+gabc"}, {}, "vllm", "fault", "pip install 'vllm>="),
        ({"vllm": "0.33.1rc1"}, {}, "vllm", "ok", ""),
        ({"vllm": "0.34.0"}, {}, "vllm", "fault", "pip install"),
        ({"vllm": "1.0"}, {}, "vllm", "fault", "pip install"),
        ({"vllm": "dev"}, {}, "vllm", "warning", "pip install"),
        ({"gpu": H200 | REFUSED}, {}, "gpu", "warning", "set host_bytes"),
        ({"gpu": NO_GPU}, {}, "gpu", "warning", "nvidia-smi"),
        ({"gpu": NO_GPU | {"cuda": None}}, {}, "gpu", "ok", ""),
    ],
)
def test_judgements(
    change: dict[str, Any], options: dict[str, Any], check: str, status: str, remedy: str
) -> None:
    finding = judged(replace(FINE, **change), **options)[check]
    assert finding.status == status
    assert remedy in finding.remedy
    assert bool(finding.remedy) == (status != "ok")


def test_what_is_not_installed_is_not_judged() -> None:
    found = judged(replace(FINE, vllm=None, gpu="torch is not installed"))
    assert (found["vllm"].status, found["gpu"].status) == ("skipped", "skipped")
    assert found["gpu"].detail == "torch is not installed"


def test_where_memory_is_pinned_is_told_or_why_not() -> None:
    assert judged(FINE)["gpu"].detail.endswith("on NUMA node 1, that of GPU 0000:5e:00.0")
    refused = judged(replace(FINE, gpu=H200 | REFUSED))["gpu"]
    assert "cudaErrorMemoryAllocation (2)" in refused.detail


@pytest.mark.usefixtures("no_torch")
def test_this_host() -> None:
    facts = look({"PYTHONHASHSEED": "7"})
    assert facts.slab_error == ""
    assert facts.available_bytes > 0
    assert facts.hash_seed == "7"
    assert facts.shm_bytes == os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize


@pytest.mark.usefixtures("no_torch")
def test_memory_of_running_engines_counts_as_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "existing_slabs", lambda: [(4 * GIB, 3 * GIB)])
    monkeypatch.setattr(host, "memory_limits", lambda: MemoryLimits(2**40, 6 * GIB, 5 * GIB, None))
    assert look({}).available_bytes == 4 * GIB


@pytest.mark.usefixtures("no_torch")
def test_no_shm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "SHM", str(tmp_path / "none"))
    assert look({}).shm_bytes is None


@pytest.mark.usefixtures("no_torch")
def test_memory_files_that_are_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbid(*_: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", forbid)
    assert "Operation not permitted" in look({}).slab_error


def test_memory_that_killed_engines_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "SHM", str(tmp_path))
    used, left = (tmp_path / f"vllm_offload_{name}.mmap" for name in ("used", "left"))
    used.write_bytes(bytes(mmap.PAGESIZE))
    with used.open("r+b") as file, mmap.mmap(file.fileno(), 0):
        assert host.left_by_kills().status == "ok"
        left.touch()
        os.mkfifo(tmp_path / "vllm_offload_fifo.mmap")  # opening it would wait for ever
        found = judged(replace(FINE, left=host.left_by_kills()))["killed engines"]
    assert (found.status, found.remedy.partition(",")[0]) == ("warning", f"rm {left}")


def test_the_range_is_that_of_the_package() -> None:
    first, end = (".".join(map(str, bound)) for bound in host.SUPPORTED)
    assert f'"vllm>={first},<{end}",' in (ROOT / "pyproject.toml").read_text()


def test_the_version_that_is_here() -> None:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    import vllm

    version = vllm_s3kv.vllm_version()
    assert vllm.__version__.startswith(version.partition("+")[0])


def test_no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert vllm_s3kv.vllm_version() is None


def test_a_vllm_that_is_too_old_is_refused_with_the_reason() -> None:
    finding = judged(replace(FINE, vllm="0.30.0"))["vllm"]
    assert finding.detail == vllm_s3kv.refusal("0.30.0")
    assert "keep requests waiting for ever" in finding.detail
    for version in (None, "dev", "0.1.dev1+gabc", "0.31.0", "0.34.0", "1.0"):
        assert vllm_s3kv.refusal(version) == ""


def test_torch_is_asked_in_a_process_of_its_own() -> None:
    torch = pytest.importorskip("torch")
    found = host._look_for_gpu()
    assert not isinstance(found, str), found
    assert found["torch"] == torch.__version__
    assert (found["device"] is None) == (not torch.cuda.is_available())


def test_torch_that_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = (sys.executable, "-c", "raise SystemExit('libcudart.so.13: cannot open')")
    monkeypatch.setattr(host, "_PROBE", broken)
    assert host._look_for_gpu() == "torch cannot be queried: libcudart.so.13: cannot open"


def test_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "not installed" in str(host._look_for_gpu())
