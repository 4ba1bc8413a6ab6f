"""What doctor says of this host: looked at for real, judged as a table."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from s3kv.cli.doctor import host
from s3kv.cli.doctor.findings import Finding
from s3kv.cli.doctor.host import Host, examine, look
from s3kv.config import Config

GIB = 2**30
FINE = Host(
    available_bytes=16 * GIB,
    slab_error="",
    shm_bytes=8 * GIB,
    memlock_bytes=None,
    hash_seed="0",
)


def judged(
    facts: Host,
    *,
    workers: int = 1,
    algorithm: str = "sha256",
    pinned_bytes: int | None = 0,
) -> Mapping[str, Finding]:
    config = Config(bucket="bkt", host_bytes=4 * GIB)
    found = examine(config, facts, workers=workers, algorithm=algorithm, pinned_bytes=pinned_bytes)
    return {finding.check: finding for finding in found}


def test_all_is_well() -> None:
    assert {finding.status for finding in judged(FINE, workers=4).values()} == {"ok"}


@pytest.mark.parametrize(
    ("change", "options", "check", "status", "remedy"),
    [
        ({"available_bytes": 4 * GIB - 1}, {}, "memory", "fault", "set host_bytes lower"),
        ({"available_bytes": 4 * GIB}, {}, "memory", "ok", ""),
        ({}, {"workers": 5}, "memory", "fault", "set host_bytes lower"),
        ({"slab_error": "forbidden"}, {}, "memory", "fault", "allow memfd_create"),
        ({"shm_bytes": None}, {}, "shm", "ok", ""),
        ({"shm_bytes": None}, {"workers": 2}, "shm", "fault", "docker run --shm-size"),
        ({"shm_bytes": 64 * 2**20}, {"workers": 2}, "shm", "warning", "docker run --shm-size"),
        ({"memlock_bytes": 8 * 2**20}, {}, "memlock", "warning", "ulimit -l unlimited"),
        ({"memlock_bytes": 8 * 2**20}, {"pinned_bytes": None}, "memlock", "ok", ""),
        ({"memlock_bytes": 8 * 2**20}, {"pinned_bytes": 2**26}, "memlock", "ok", ""),
        ({"memlock_bytes": 2**27}, {"pinned_bytes": 2**26}, "memlock", "warning", "ulimit -l"),
        ({"memlock_bytes": 4 * GIB}, {}, "memlock", "ok", ""),
        ({"hash_seed": None}, {}, "hash seed", "ok", ""),
        ({"hash_seed": "random"}, {}, "hash seed", "warning", "unset it"),
        ({"hash_seed": None}, {"algorithm": "xxhash"}, "hash seed", "fault", "or use sha256_cbor"),
        ({"hash_seed": "0"}, {"algorithm": "xxhash_cbor"}, "hash seed", "ok", ""),
    ],
)
def test_judgements(
    change: dict[str, Any], options: dict[str, Any], check: str, status: str, remedy: str
) -> None:
    finding = judged(replace(FINE, **change), **options)[check]
    assert finding.status == status
    assert remedy in finding.remedy
    assert bool(finding.remedy) == (status != "ok")


def test_this_host() -> None:
    facts = look({"PYTHONHASHSEED": "7"})
    assert facts.slab_error == ""
    assert facts.available_bytes > 0
    assert facts.hash_seed == "7"
    assert facts.shm_bytes == os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize


def test_no_shm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "SHM", str(tmp_path / "none"))
    assert look({}).shm_bytes is None


def test_memory_files_that_are_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbid(*_: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", forbid)
    assert "Operation not permitted" in look({}).slab_error
