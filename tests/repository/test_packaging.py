"""What users install is what is tested: the wheel, the sdist, and what is in them."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import s3kv
from tests.project import ROOT, declared, extras

STEM = f"vllm_s3kv-{s3kv.__version__}"

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("packaging")]


def run(*command: str | Path, cwd: Path) -> str:
    """What the command prints. Neither PYTHONPATH nor its folder makes the checkout importable."""
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(cwd), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True,
        timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def built(kind: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (archive,) = folder.iterdir()
    return archive


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    archive = built("sdist", tmp_path_factory.mktemp("sdist"))
    assert archive.name == f"{STEM}.tar.gz"
    return archive


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built("wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`bin` of a fresh environment with s3kv from the wheel, and everything else from ours."""
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder / "env", with_pip=False)
    python = folder / "env" / "bin" / "python"
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder)
    # A path file adds one folder and reads no path files in it, so an editable s3kv stays behind.
    Path(site.strip(), "ours.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index"]
    run(*pip, wheel, cwd=folder)
    return python.parent


def members(archive: Path) -> dict[str, bytes]:
    """Every file of a wheel or sdist, by its name without the sdist's own folder."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return {name: wheel.read(name) for name in wheel.namelist()}
    with tarfile.open(archive) as sdist:
        files = {m.name: sdist.extractfile(m) for m in sdist if m.isfile() or m.issym()}
        return {name.partition("/")[2]: f.read() for name, f in files.items() if f}


def tracked() -> set[str]:
    if not (ROOT / ".git").exists():
        pytest.skip("this is no checkout")
    done = subprocess.run(
        ["git", "ls-files"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    )  # fmt: skip
    return {name for name in done.stdout.splitlines() if (ROOT / name).is_file()}


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    info = f"{STEM}.dist-info"
    package = {name for name in tracked() if name.startswith("s3kv/")}
    about = {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE"}
    assert "s3kv/py.typed" in package
    assert set(members(wheel)) == package | {"vllm_s3kv.py"} | {f"{info}/{name}" for name in about}


def test_the_sdist_holds_what_a_checkout_needs_and_nothing_else(sdist: Path) -> None:
    packed = set(members(sdist))
    assert packed - tracked() == {"PKG-INFO"}
    left_out = {name for name in tracked() - packed if not name.startswith(".")}
    assert left_out == set()


def test_the_sdist_builds_the_same_wheel(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-index"]
    run(*pip, "--no-build-isolation", "--wheel-dir", tmp_path, sdist, cwd=tmp_path)
    assert members(tmp_path / wheel.name) == members(wheel)


def test_the_metadata_say_what_pyproject_says(wheel: Path) -> None:
    metadata = members(wheel)[f"{STEM}.dist-info/METADATA"].decode()
    assert f"Version: {s3kv.__version__}" in metadata
    assert "Requires-Python: >=3.10" in metadata
    assert set(re.findall(r"^Provides-Extra: (.*)$", metadata, re.M)) == set(extras())
    always = [r for r in re.findall(r"^Requires-Dist: (.*)$", metadata, re.M) if "extra" not in r]
    assert {Requirement(r).name for r in always} == {
        Requirement(r).name for r in declared()["dependencies"]
    }
    assert not {"torch", "numpy", "vllm"} & {Requirement(r).name for r in always}


def test_the_index_page_is_the_readme_without_links_into_the_repository(wheel: Path) -> None:
    metadata = members(wheel)[f"{STEM}.dist-info/METADATA"].decode()
    page = metadata.partition("\n\n")[2]
    targets = re.findall(r"\]\(([^)]*)\)", page)
    assert targets
    assert [t for t in targets if not t.startswith("https://")] == []
    headings = re.findall(r"^#+ .*$", page, re.M)
    assert headings == re.findall(r"^#+ .*$", (ROOT / "README.md").read_text(), re.M)
    assert "Project-URL" not in metadata


def test_every_module_is_there_and_importable(installed: Path, tmp_path: Path) -> None:
    code = (
        "import importlib, pkgutil, s3kv, sys\n"
        "names = [m.name for m in pkgutil.walk_packages(s3kv.__path__, 's3kv.')]\n"
        "for name in names:\n"
        "    if not name.startswith('s3kv.connectors') and not name.endswith('__main__'):\n"
        "        importlib.import_module(name)\n"
        "print(s3kv.__file__, len(names))\n"
    )
    where, count = run(installed / "python", "-c", code, cwd=tmp_path).split()
    assert Path(where).is_relative_to(installed.parent)
    modules = [p for p in (ROOT / "s3kv").rglob("*.py") if p.parent != ROOT / "s3kv"]
    top = [p for p in (ROOT / "s3kv").glob("*.py") if p.name != "__init__.py"]
    assert int(count) == len(modules) + len(top)


def test_the_commands_work(installed: Path, tmp_path: Path) -> None:
    assert "doctor" in run(installed / "s3kv", "--help", cwd=tmp_path)
    assert s3kv.__version__ in run(installed / "s3kv", "--version", cwd=tmp_path)
    # What a worker starts for its I/O.
    assert "--slab-fd" in run(installed / "python", "-m", "s3kv.io", "--help", cwd=tmp_path)


def test_the_entry_point_registers_both_connectors(installed: Path, tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    code = (
        "from vllm.plugins import load_general_plugins\n"
        "load_general_plugins()\n"
        "from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory\n"
        "from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory\n"
        "print('loaded', KVConnectorFactory.get_connector_class_by_name('S3KVConnector'),\n"
        "      'S3ECConnector' in ECConnectorFactory._registry)\n"
    )
    printed = run(installed / "python", "-c", code, cwd=tmp_path).splitlines()[-1]
    assert printed == "loaded <class 's3kv.connectors.kv.S3KVConnector'> True"
