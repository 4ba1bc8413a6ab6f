"""Findings on the directory of `disk_path`, on real directories."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from s3kv.cli.doctor import disk
from s3kv.cli.doctor.disk import examine, kind_of
from s3kv.cli.doctor.findings import Finding
from s3kv.config import Config
from tests.unit.cli.conftest import Run
from tests.unit.cli.doctor.conftest import SMALL, findings

MOUNTS = r"""
27 1 254:0 / / rw - overlay overlay rw,lowerdir=/a
28 27 254:1 / /mnt rw shared:1 - ext4 /dev/nvme0n1 rw
29 28 254:2 / /mnt/with\040space rw - xfs /dev/nvme1n1 rw
30 28 0:30 / /mnt/home rw - ext4 /dev/vdb rw
31 28 0:31 / /mnt/home rw master:2 - nfs4 server:/home rw
"""


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "FILE_BYTES", 2**16)


def judged(path: Path, nbytes: str = "1MB", *, read_only: bool = False) -> Mapping[str, Finding]:
    config = Config(bucket="bkt", disk_path=str(path), disk_bytes=nbytes)  # type: ignore[arg-type]
    found = examine(config, time.perf_counter, read_only=read_only)
    return {finding.check: finding for finding in found}


def test_a_directory_is_made_and_measured_and_nothing_is_left(tmp_path: Path) -> None:
    found = judged(tmp_path / "new")
    assert list(found) == ["disk", "disk kind", "disk room", "disk speed"]
    assert {found[check].status for check in ("disk", "disk room", "disk speed")} == {"ok"}
    assert "4 files of 64.0 KiB, one after another" in found["disk speed"].detail
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    assert not list((tmp_path / "new/writing").iterdir())


def test_without_a_disk_nothing_is_found() -> None:
    assert examine(Config(bucket="bkt"), time.perf_counter, read_only=False) == []


def test_read_only_makes_nothing(tmp_path: Path) -> None:
    assert judged(tmp_path / "new", read_only=True)["disk"].status == "skipped"
    assert not (tmp_path / "new").exists()


def test_a_directory_that_others_may_write_to(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (finding,) = judged(tmp_path / "open").values()
    assert (finding.status, "others may write" in finding.detail) == ("fault", True)
    assert "that s3kv makes itself" in finding.remedy


def test_a_disk_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail)
    (finding,) = judged(tmp_path / "new").values()
    assert finding.status == "fault"
    assert "Input/output error" in finding.detail


def test_a_budget_beyond_the_disk(tmp_path: Path) -> None:
    finding = judged(tmp_path / "new", "1000TB")["disk room"]
    assert (finding.status, "set disk_bytes lower" in finding.remedy) == ("warning", True)


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/var/cache", "overlay"),
        ("/mnt", "ext4"),
        ("/mntx", "overlay"),
        ("/mnt/with space/s3kv", "xfs"),
        ("/mnt/home/me/s3kv", "nfs4"),
    ],
)
def test_the_file_system_is_the_last_mounted_above_the_path(path: str, kind: str) -> None:
    assert kind_of(path, MOUNTS.strip()) == kind


@pytest.mark.parametrize(
    ("kind", "status"),
    [("ext4", "ok"), ("xfs", "ok"), ("nfs4", "warning"), ("fuse.s3fs", "warning"),
     ("tmpfs", "warning"), ("overlay", "warning")],
)  # fmt: skip
def test_file_systems_that_are_no_local_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, status: str
) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"27 1 254:0 / / rw - {kind} /dev/x rw\n")
    monkeypatch.setattr(disk, "MOUNTS", str(mounts))
    finding = judged(tmp_path / "new")["disk kind"]
    assert (finding.status, kind in finding.detail) == (status, True)


@pytest.mark.usefixtures("no_torch")
def test_the_command_examines_the_disk_that_is_set(run: Run, tmp_path: Path) -> None:
    settings = ("--set", f"disk_path={tmp_path}/new", "--set", "disk_bytes=1MB")
    found = findings(run("doctor", *SMALL, *settings))
    assert found["disk"]["status"] == "ok"
