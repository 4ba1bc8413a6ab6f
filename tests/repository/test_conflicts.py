"""Another distribution with the same import name, beside ours or before it on the path."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.project import ROOT, plant

CALLS = {
    "the command line": "import vllm_s3kv; vllm_s3kv.main()",
    "the connectors": "import s3kv.connectors",
    "the library": "import s3kv.library",
}


def _describe(folder: Path, name: str, files: list[str], version: str = "0.1.5") -> None:
    about = folder / f"{name}-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (about / "RECORD").write_text("".join(f"{file},,\n" for file in files))


def start(code: str, *path: Path) -> subprocess.CompletedProcess[str]:
    """Run the code in a process that finds `path` first, and what is installed here after it."""
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))}
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=path[0], env=variables, capture_output=True, text=True, check=False,
    )  # fmt: skip


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    return (done.stderr.strip().splitlines() or [""])[-1]


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    """A folder as pip leaves it after the installation of ours: module, package, metadata."""
    folder, left = tmp_path / "ours", shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "s3kv", folder / "s3kv", ignore=left)
    shutil.copy(ROOT / "vllm_s3kv.py", folder)
    _describe(folder, "vllm_s3kv", ["s3kv/__init__.py", "vllm_s3kv.py"])
    return folder


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_alone_it_starts(ours: Path, call: str) -> None:
    call = call.replace("main()", "_conflict() and 1 / 0")
    assert start(call, ours).returncode == 0


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("overwritten", [True, False])
def test_a_distribution_with_files_among_ours(ours: Path, call: str, overwritten: bool) -> None:
    """Installed after ours it has replaced files; installed before it, some of its own are left."""
    _describe(ours, "s3kv", ["s3kv/__init__.py", "s3kv/client.py"])
    if overwritten:
        (ours / "s3kv" / "__init__.py").write_text("# theirs\n")
    done = start(call, ours)
    assert done.returncode != 0
    assert "s3kv 0.1.5, has files among those of vllm-s3kv" in last_line(done)
    assert "pip uninstall s3kv vllm-s3kv" in last_line(done)


def test_a_package_before_ours_on_the_path(ours: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    plant(theirs, {"s3kv/__init__.py": "raise RuntimeError('theirs was imported')\n"})
    done = start(CALLS["the command line"], theirs, ours)
    assert done.returncode == 2
    assert f"another package s3kv ({theirs / 's3kv'}) before that of vllm-s3kv" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_vllm_logs_it_and_starts_without_us(ours: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    plant(theirs, {"s3kv/__init__.py": ""})
    done = start("import vllm_s3kv; vllm_s3kv.register()", theirs, ours)
    assert done.returncode == 0, done.stderr
    assert "another package s3kv" in done.stderr


@pytest.mark.parametrize("version", ["0.29.0", "0.30.1+cu129"])
def test_a_vllm_whose_scheduler_can_stop_is_refused(ours: Path, version: str) -> None:
    _describe(ours, "vllm", [], version)
    code = "import sys, vllm_s3kv; vllm_s3kv.register(); assert 'vllm' not in sys.modules"
    done = start(code, ours)
    assert done.returncode == 0, "nothing is registered, and engines without s3kv start"
    for told in (done.stderr, start(CALLS["the connectors"], ours).stderr):
        assert f"vLLM {version} is not supported" in told
        assert "keep requests waiting for ever" in told
        assert "(vllm#57841): use vLLM 0.31 or later" in told
    for call in ("import s3kv.library", "import s3kv.cli.__main__"):
        assert start(call, ours).returncode == 0, "they need no vLLM"


def test_a_distribution_of_that_name_elsewhere_is_no_conflict(ours: Path, tmp_path: Path) -> None:
    """Such as the metadata of an editable installation, or a package that ours hides."""
    theirs = tmp_path / "theirs"
    (theirs / "s3kv").mkdir(parents=True)
    _describe(theirs, "s3kv", ["s3kv/__init__.py"])
    assert start("import s3kv.library", ours, theirs).returncode == 0


def test_without_torch_the_library_says_what_to_install(ours: Path) -> None:
    done = start("import sys; sys.modules['torch'] = None; from s3kv import TieredStore", ours)
    assert last_line(done) == (
        "ImportError: s3kv.TieredStore needs the package torch, which vLLM brings along; without "
        "vLLM: pip install 'vllm-s3kv[torch]'"
    )
