"""A stand-in for vLLM's official image: what deploy/Dockerfile needs of it, from this machine.

It has this Python without its packages, uv, a shell and the programs of the Dockerfile's commands,
with the libraries these load. Of the packages that compute there are only the names and versions.
It has no vLLM, no torch and no CUDA: what is built on it shows that the Dockerfile's steps work,
and nothing of the engine.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

BASE = "docker.io/vllm/vllm-openai"
COMPUTES = {"torch": "2.13.0", "numpy": "2.3.1", "transformers": "5.0.0"}
_PROGRAMS = ("sh", "grep", "cat", "ls", "id")
_AUTHORITIES = "/etc/ssl/certs/ca-certificates.crt"
_LEFT_OUT = ("site-packages", "test", "idlelib", "__pycache__", "*.a", "config-*")


class Buildah:
    """A builder of images with a store of its own in the empty folder `home`. Needs root."""

    def __init__(self, home: Path) -> None:
        self._home = home
        policy = home / "policy.json"
        policy.write_text('{"default": [{"type": "insecureAcceptAnything"}]}')
        self._policy = f"--signature-policy={policy}"

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        store = (f"--root={self._home / 'store'}", f"--runroot={self._home / 'run'}")
        return subprocess.run(
            ["buildah", *store, "--storage-driver=vfs", *arguments],
            capture_output=True, text=True, check=False, timeout=800,
        )  # fmt: skip

    def build(self, folder: Path, tag: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Build what a Dockerfile says in `folder`, without asking a registry for the base."""
        return self.run(
            "bud", "--isolation=chroot", "--pull-never", self._policy, f"--tag={tag}",
            *arguments, str(folder),
        )  # fmt: skip

    def close(self) -> None:
        shutil.rmtree(self._home, ignore_errors=True)


def build_base(buildah: Buildah, folder: Path, tag: str, packages: Mapping[str, str]) -> None:
    """The stand-in as an image, with these names and versions of packages."""
    root = folder / "root"
    python = Path(sys.base_prefix)
    shutil.copytree(
        python, root / python.relative_to("/"), symlinks=True,
        ignore=shutil.ignore_patterns(*_LEFT_OUT),
    )  # fmt: skip
    (interpreter,) = (python / "bin").glob(f"python3.{sys.version_info.minor}")
    programs = [Path(shutil.which(name) or name) for name in _PROGRAMS]
    programs.append(Path(_installed_uv()))
    binaries = root / "usr" / "bin"
    binaries.mkdir(parents=True)
    for program in programs:
        shutil.copy(program, binaries / program.name)
    (root / "bin").symlink_to("usr/bin")
    loaded = _libraries([interpreter, *programs, *(python / "lib").rglob("lib-dynload/*.so")])
    for library in sorted(loaded | {Path("/lib/x86_64-linux-gnu/libnss_dns.so.2")}):
        if library.is_file() and python not in library.parents:
            target = root / library.relative_to("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(library, target)
    site = root / python.relative_to("/") / f"lib/{interpreter.name}/site-packages"
    for name, version in packages.items():
        record = site / f"{name}-{version}.dist-info"
        record.mkdir(parents=True)
        (record / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        (record / "RECORD").write_text("")
    for empty in ("etc/ssl/certs", "home/vllm", "tmp", "proc", "dev", "sys", "opt"):
        (root / empty).mkdir(parents=True, exist_ok=True)
    (root / "etc/passwd").write_text(
        "root:x:0:0::/root:/bin/sh\nvllm:x:2000:0::/home/vllm:/bin/sh\n"
    )
    shutil.copy(os.environ.get("PIP_CERT", _AUTHORITIES), root / _AUTHORITIES[1:])
    (folder / "Dockerfile").write_text(
        "FROM scratch\nCOPY root /\n"
        f"ENV PATH={python}/bin:/usr/bin SSL_CERT_FILE={_AUTHORITIES} UV_SYSTEM_CERTS=1\n"
    )
    done = buildah.build(folder, tag)
    assert done.returncode == 0, done.stderr


def _installed_uv() -> str:
    beside = Path(sys.executable).with_name("uv")
    return str(beside) if beside.is_file() else shutil.which("uv") or "uv"


def _libraries(binaries: Iterable[Path]) -> set[Path]:
    """What the dynamic linker loads for them."""
    told = subprocess.run(
        ["ldd", *map(str, binaries)], capture_output=True, text=True, check=False
    ).stdout
    return {Path(path) for path in re.findall(r"(/\S+) \(0x", told)}
