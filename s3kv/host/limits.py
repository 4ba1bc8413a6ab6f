"""What bounds the memory of a process: the machine, its container, and what it may lock."""

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
"""Limit and use, of version 2 and of version 1, where a container sees its own."""
_UNLIMITED_BYTES = 2**60
"""Version 1 has no word for it, and writes the largest number of whole pages."""


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """machine_bytes: what Linux calls available. container_bytes: the limit of the container,
    container_used_bytes: what of it is in use, file cache included; None where there is no limit.
    locked_bytes: what a process may lock (RLIMIT_MEMLOCK); None without a limit.
    """

    machine_bytes: int
    container_bytes: int | None
    container_used_bytes: int | None
    locked_bytes: int | None

    @property
    def available_bytes(self) -> int:
        """What this process could still get. A container's limit is taken whole, although
        something is in use already: part of that is cache which makes room.
        """
        if self.container_bytes is None:
            return self.machine_bytes
        return min(self.machine_bytes, self.container_bytes)

    def __str__(self) -> str:
        """For a message: all of them in a line."""
        told = f"{self.machine_bytes:,} bytes of memory are available on this machine"
        if self.container_bytes is not None:
            told += f", the container may have {self.container_bytes:,}"
            if self.container_used_bytes is not None:
                told += f" and uses {self.container_used_bytes:,}"
        if self.locked_bytes is None:
            return f"{told}, a process may lock any amount"
        return f"{told}, a process may lock {self.locked_bytes:,} (ulimit -l)"


def memory_limits(root: Path = ROOT) -> MemoryLimits:
    """Those of this process now. root: where /proc and /sys are."""
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
