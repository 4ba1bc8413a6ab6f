"""Parts of `make release` that take seconds. tests/repository installs what it builds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import s3kv
from scripts import release

CHANGELOG = """# Changelog

## [Unreleased]

### Added

- news

## [0.2.0] - 2026-01-01

- older

## [0.1.0] - 2025-01-01
"""


def test_the_notes_are_the_section_of_the_version() -> None:
    assert release.notes(CHANGELOG, "0.3.0.dev0") == "### Added\n\n- news\n"
    assert release.notes(CHANGELOG, "0.2.0") == "- older\n"


@pytest.mark.parametrize("version", ["0.1.0", "0.2", "9.9.9"])
def test_no_release_without_notes(version: str) -> None:
    with pytest.raises(release.ReleaseError, match=r"says nothing under ## \["):
        release.notes(CHANGELOG, version)


def test_nothing_stays_unreleased_beside_a_final_version() -> None:
    with pytest.raises(release.ReleaseError, match=r"to ## \[0.2.0\], or set a later one"):
        release.refuse_unreleased(CHANGELOG, "0.2.0")
    release.refuse_unreleased(CHANGELOG, "0.3.0.dev0")
    release.refuse_unreleased(CHANGELOG.replace("### Added\n\n- news\n", ""), "0.2.0")


def test_only_dist_is_emptied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "ROOT", tmp_path)
    files = [tmp_path / "dist" / "file", tmp_path / "other" / "file"]
    for file in files:
        release.make_empty(file.parent)
        file.touch()
    release.make_empty(files[0].parent)
    with pytest.raises(release.ReleaseError, match="other is not empty, and only dist"):
        release.make_empty(files[1].parent)
    assert [file.exists() for file in files] == [False, True]


def test_this_version_has_notes() -> None:
    assert release.notes((release.ROOT / "CHANGELOG.md").read_text(), s3kv.__version__)


def test_checksums_are_what_sha256sum_reads(tmp_path: Path) -> None:
    for name in ("a.whl", "b.tar.gz"):
        (tmp_path / name).write_text(name)
    (tmp_path / "SHA256SUMS").write_text(release.checksums(tmp_path))
    assert release.checksums(tmp_path).count("\n") == 2
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=tmp_path, check=True)


@pytest.mark.long
def test_twine_accepts_what_is_built(tmp_path: Path) -> None:
    pytest.importorskip("twine")
    archives = release.build(tmp_path)
    kinds = [a.name.removeprefix(f"vllm_s3kv-{s3kv.__version__}") for a in archives]
    assert kinds == [".tar.gz", "-py3-none-any.whl"]
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *archives], check=True)
