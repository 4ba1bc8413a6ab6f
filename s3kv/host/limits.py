"""Memory limits of a process: of the machine, of its cgroups, and on locked memory."""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TypeAlias

ROOT = Path("/")
_CGROUPS = (
    ("", "sys/fs/cgroup", "memory.max", ("anon", "shmem")),
    ("memory", "sys/fs/cgroup/memory", "memory.limit_in_bytes", ("total_rss", "total_shmem")),
)
"""For versions 2 and 1: the controller in /proc/self/cgroup, where its groups are, the file with
the limit, and the fields of memory.stat for memory that, unlike file cache, cannot be reclaimed."""
_UNLIMITED_BYTES = 2**60
"""Limits from this value on mean "unlimited": version 1 writes the largest number of pages."""

Plan: TypeAlias = tuple[tuple[int, int, str], ...]
"""Memory planned on this host. Each part: how many slabs, the bytes of one, and their setting."""


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """Memory limits, in bytes.

    machine_bytes: available memory according to Linux. container_bytes: limit of the cgroup of this
    process that has the least memory left; container_used_bytes: its use, without file cache; both
    None without a limit. locked_bytes: memory that a process may lock (RLIMIT_MEMLOCK); None
    without a limit.
    """

    machine_bytes: int
    container_bytes: int | None
    container_used_bytes: int | None
    locked_bytes: int | None

    @property
    def available_bytes(self) -> int:
        """Bytes this process could still get."""
        if self.container_bytes is None or self.container_used_bytes is None:
            return self.machine_bytes
        return max(0, min(self.machine_bytes, self.container_bytes - self.container_used_bytes))

    def __str__(self) -> str:
        """All limits in one line, for a message."""
        told = f"{self.machine_bytes:,} bytes of memory are available on this machine"
        if self.container_bytes is not None:
            told += f", the container may have {self.container_bytes:,}"
            told += f" and uses {self.container_used_bytes:,}"
        locked = self.locked_bytes
        lock = "any amount" if locked is None else f"{locked:,} (ulimit -l)"
        return f"{told}, a process may lock {lock}"

    def shortage(self, planned: Plan, slabs: Collection[tuple[int, int]]) -> str:
        """The reason why the slabs of this host do not fit; "" if they do. Pure.

        planned: slabs of one engine. slabs: all that exist, of any engine, each with its size and
        the bytes it has taken so far. Its size counts as needed and its taken bytes as available,
        so the order in which processes take their memory makes no difference.
        """
        exist = Counter(size for size, _ in slabs)
        here = tuple((count, size, "slabs on this host") for size, count in exist.items())
        parts = max(planned, here, key=_sum)
        taken_bytes = sum(taken for _, taken in slabs)
        allowed_bytes = self.available_bytes + taken_bytes
        if _sum(parts) <= allowed_bytes:
            return ""
        told = " + ".join(f"{count} × {nbytes:,} ({setting})" for count, nbytes, setting in parts)
        return (
            f"{told} = {_sum(parts):,} bytes are needed on this host, and {allowed_bytes:,} are "
            f"available here. s3kv has taken {taken_bytes:,} already ({self})"
        )


def _sum(plan: Plan) -> int:
    return sum(count * nbytes for count, nbytes, _ in plan)


def memory_limits(root: Path = ROOT) -> MemoryLimits:
    """Read the present limits of this process. root: parent directory of /proc and /sys."""
    fields = dict(line.split(":", 1) for line in _lines(root / "proc/meminfo"))
    container_bytes, used_bytes = min(
        _cgroups(root), key=lambda found: found[0] - found[1], default=(None, None)
    )
    locked_bytes, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return MemoryLimits(
        machine_bytes=int(fields["MemAvailable"].split()[0]) * 1024,
        container_bytes=container_bytes,
        container_used_bytes=used_bytes,
        locked_bytes=None if locked_bytes == resource.RLIM_INFINITY else locked_bytes,
    )


def _cgroups(root: Path) -> Iterator[tuple[int, int]]:
    """Limit and use of each cgroup with a limit, from this process's own up to the topmost here."""
    own: dict[str, str] = {}
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        own |= dict.fromkeys(controllers.split(","), path.lstrip("/"))
    for controller, top, limit_name, used_names in _CGROUPS:
        # In a container, the path may be the host's; its own group is then at the top.
        group = PurePosixPath(own.get(controller, ""))
        for directory in (root / top / level for level in (group, *group.parents)):
            limit = "".join(_lines(directory / limit_name))
            if limit.isdecimal() and int(limit) < _UNLIMITED_BYTES:
                fields = dict(line.split() for line in _lines(directory / "memory.stat"))
                yield int(limit), sum(int(fields.get(name, 0)) for name in used_names)


def _lines(path: Path) -> list[str]:
    """The lines of a file; none if there is no such file, or no permission to read it."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
