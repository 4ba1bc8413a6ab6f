"""What the machine is, as one JSON document: `python -m scripts.gpu.facts`."""

from __future__ import annotations

import importlib.metadata
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PROGRAMS = ("gcc", "cc", "nvcc", "compute-sanitizer", "numactl")
SAID = {
    "driver": ("nvidia-smi",),
    "links": ("nvidia-smi", "topo", "-m"),
    "bus": ("nvidia-smi", "-q", "-d", "PCIE"),
    "memory": ("free", "-g"),
    "processors": ("lscpu",),
    "shared memory": ("df", "-h", "/dev/shm"),
}
FILES = (
    "/proc/version",
    "/proc/driver/nvidia/version",
    "/proc/driver/nvidia/params",
    "/sys/kernel/mm/transparent_hugepage/enabled",
    "/sys/kernel/mm/transparent_hugepage/shmem_enabled",
    "/sys/fs/cgroup/memory.max",
)
LIMITS = ("RLIMIT_MEMLOCK", "RLIMIT_NOFILE", "RLIMIT_NPROC", "RLIMIT_AS")


def look() -> dict[str, Any]:
    """All facts as plain data; None stands for what this machine does not have, or does not say."""
    return {
        "python": sys.version,
        "packages": sorted(
            {f"{d.name}=={d.version}" for d in importlib.metadata.distributions() if d.name}
        ),
        "programs": {name: shutil.which(name) for name in PROGRAMS},
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in LIMITS},
        "cores": sorted(os.sched_getaffinity(0)),
        "said": {name: said(command) for name, command in SAID.items()},
        "files": {name: content(Path(name)) for name in FILES},
    }


def said(command: Sequence[str]) -> list[str] | None:
    """The lines that a program prints; None where there is no such program, or it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.splitlines()


def content(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


if __name__ == "__main__":
    print(json.dumps(look(), indent=2))
