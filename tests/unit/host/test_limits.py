"""What bounds memory, read from the files as Linux writes them."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from s3kv.host.limits import MemoryLimits, memory_limits

GIB = 2**30
MEMINFO = "MemTotal:       24684096 kB\nMemFree: 1 kB\nMemAvailable:   19160876 kB\n"
V1 = "sys/fs/cgroup/memory/memory."


def limits_of(tmp_path: Path, files: dict[str, str]) -> MemoryLimits:
    for name, content in {"proc/meminfo": MEMINFO, **files}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return memory_limits(tmp_path)


@pytest.mark.parametrize(
    ("files", "container"),
    [
        ({}, (None, None)),
        ({"sys/fs/cgroup/memory.max": "max\n"}, (None, None)),
        (
            {"sys/fs/cgroup/memory.max": "4096\n", "sys/fs/cgroup/memory.current": "1024\n"},
            (4096, 1024),
        ),
        ({"sys/fs/cgroup/memory.max": "4096\n"}, (4096, None)),
        ({f"{V1}limit_in_bytes": "8192\n", f"{V1}usage_in_bytes": "4096\n"}, (8192, 4096)),
        ({f"{V1}limit_in_bytes": "9223372036854771712\n"}, (None, None)),
    ],
)
def test_a_container_and_its_limit(
    tmp_path: Path, files: dict[str, str], container: tuple[int | None, int | None]
) -> None:
    found = limits_of(tmp_path, files)
    assert found.machine_bytes == 19160876 * 1024
    assert (found.container_bytes, found.container_used_bytes) == container


@pytest.mark.parametrize(
    ("machine", "container", "available"), [(8, None, 8), (8, 4, 4), (8, 16, 8)]
)
def test_what_is_available(machine: int, container: int | None, available: int) -> None:
    assert MemoryLimits(machine, container, None, None).available_bytes == available


def test_what_a_process_may_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, locked in [(resource.RLIM_INFINITY, None), (65536, 65536)]:
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=limit: (soft, soft))
        assert memory_limits().locked_bytes == locked


def test_in_words() -> None:
    told = str(MemoryLimits(64 * GIB, 16 * GIB, 4 * GIB, 8192))
    assert "17,179,869,184 and uses 4,294,967,296" in told
    assert "may lock 8,192 (ulimit -l)" in told
    assert "container" not in str(MemoryLimits(64 * GIB, None, None, None))
