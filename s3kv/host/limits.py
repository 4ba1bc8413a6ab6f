"""Memory limits of a process: of the machine, of its container, and on locked memory."""

from __future__ import annotations

import contextlib
import resource
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")
_CGROUP = (
    ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"),
    (
        "sys/fs/cgroup/memory/memory.limit_in_bytes",
        "sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)
"""Files with a container's limit and use, for cgroup versions 2 and 1."""
_UNLIMITED_BYTES = 2**60
"""Limits from this value on mean "unlimited": version 1 writes the largest number of pages."""


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """Memory limits, in bytes.

    machine_bytes: available memory according to Linux. container_bytes: limit of the container;
    container_used_bytes: its use, with file cache; both None without a limit.
    locked_bytes: memory that a process may lock (RLIMIT_MEMLOCK); None without a limit.
    """

    machine_bytes: int
    container_bytes: int | None
    container_used_bytes: int | None
    locked_bytes: int | None

    @property
    def available_bytes(self) -> int:
        """Bytes this process could still get. A container's limit counts in full although part of
        it is in use, because file cache in it gives way.
        """
        if self.container_bytes is None:
            return self.machine_bytes
        return min(self.machine_bytes, self.container_bytes)

    def __str__(self) -> str:
        """All limits in one line, for a message."""
        told = f"{self.machine_bytes:,} bytes of memory are available on this machine"
        if self.container_bytes is not None:
            told += f", the container may have {self.container_bytes:,}"
            if self.container_used_bytes is not None:
                told += f" and uses {self.container_used_bytes:,}"
        if self.locked_bytes is None:
            return f"{told}, a process may lock any amount"
        return f"{told}, a process may lock {self.locked_bytes:,} (ulimit -l)"


def memory_limits(root: Path = ROOT) -> MemoryLimits:
    """Read the present limits of this process. root: parent directory of /proc and /sys."""
    lines = (root / "proc/meminfo").read_text("ascii").splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    container_bytes, used_bytes = _container(root)
    locked_bytes, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return MemoryLimits(
        machine_bytes=int(fields["MemAvailable"].split()[0]) * 1024,
        container_bytes=container_bytes,
        container_used_bytes=used_bytes,
        locked_bytes=None if locked_bytes == resource.RLIM_INFINITY else locked_bytes,
    )


def _container(root: Path) -> tuple[int | None, int | None]:
    for limit_name, used_name in _CGROUP:
        limit_bytes = _number(root / limit_name)
        if limit_bytes is not None and limit_bytes < _UNLIMITED_BYTES:
            return limit_bytes, _number(root / used_name)
    return None, None


def _number(path: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):  # no such cgroup, or the word "max"
        return int(path.read_text("ascii"))
    return None
