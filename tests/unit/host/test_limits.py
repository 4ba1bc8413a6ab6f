"""What bounds memory, read from the files as Linux writes them."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from s3kv.host.limits import MemoryLimits, memory_limits
from tests.project import plant

GIB = 2**30
MEMINFO = "MemTotal:       24684096 kB\nMemFree: 1 kB\nMemAvailable:   19160876 kB\n"
V2 = "sys/fs/cgroup"
V1 = "sys/fs/cgroup/memory"
PRIVATE = {"proc/self/cgroup": "0::/\n"}
"""Version 2, in a container with a cgroup namespace of its own: Docker's and containerd's usual."""
NESTED = {"proc/self/cgroup": "0::/pods.slice/pod-1.slice/engine\n"}
"""Version 2 without one, as with `cgroupns=host` and under systemd."""
JOB = "/slurm/uid_0/job_1/step_0/task_0"
SLURM = {"proc/self/cgroup": f"9:name=systemd:/\n4:cpu,cpuacct:/\n3:memory:{JOB}\n0::/\n"}
"""Version 1, in a job of Slurm, on a host that has mounted both versions."""
DOCKER = {"proc/self/cgroup": "3:memory:/docker/c0ffee\n"}
"""Version 1, in a container: the cgroup's path is the host's, and only its part is mounted."""


def v2(where: str, limit: str, anon: int = 0, shmem: int = 0) -> dict[str, str]:
    stat = f"anon {anon}\nfile 999\nkernel 9\nshmem {shmem}\n"
    return {f"{V2}{where}/memory.max": f"{limit}\n", f"{V2}{where}/memory.stat": stat}


def v1(where: str, limit: int, anon: int = 0, shmem: int = 0) -> dict[str, str]:
    stat = f"cache 999\nrss 1\nshmem 1\ntotal_cache 999\ntotal_rss {anon}\ntotal_shmem {shmem}\n"
    return {f"{V1}{where}/memory.limit_in_bytes": f"{limit}\n", f"{V1}{where}/memory.stat": stat}


@pytest.mark.parametrize(
    ("files", "container"),
    [
        pytest.param({}, (None, None), id="no cgroup"),
        pytest.param(PRIVATE | v2("", "max"), (None, None), id="no limit"),
        pytest.param(PRIVATE | v2("", "4096", 512, 256), (4096, 768), id="a container's"),
        pytest.param(PRIVATE | {f"{V2}/memory.max": "4096\n"}, (4096, 0), id="use unknown"),
        pytest.param(
            NESTED | v2("/pods.slice/pod-1.slice", "4096", 512) | v2("/pods.slice", "8192", 512),
            (4096, 512),
            id="the pod's is less than the node's",
        ),
        pytest.param(
            NESTED | v2("/pods.slice/pod-1.slice/engine", "4096") | v2("/pods.slice", "8192", 7000),
            (8192, 7000),
            id="the node has less left than the pod",
        ),
        pytest.param(
            PRIVATE | {"proc/self/cgroup": "0::/../other\n"} | v2("", "4096"),
            (4096, 0),
            id="moved out of the namespace",
        ),
        pytest.param(
            SLURM | v1(JOB, 2**63 - 4096) | v1("/slurm/uid_0/job_1", 8192, 4096, 1024),
            (8192, 5120),
            id="the job's, not the task's",
        ),
        pytest.param(DOCKER | v1("", 8192, 4096), (8192, 4096), id="a container's of version 1"),
        pytest.param(DOCKER | v1("", 2**63 - 4096), (None, None), id="none of version 1"),
    ],
)
def test_the_cgroup_that_has_least_left(
    tmp_path: Path, files: dict[str, str], container: tuple[int | None, int | None]
) -> None:
    plant(tmp_path, {"proc/meminfo": MEMINFO, **files})
    found = memory_limits(tmp_path)
    assert found.machine_bytes == 19160876 * 1024
    assert (found.container_bytes, found.container_used_bytes) == container


@pytest.mark.parametrize(
    ("machine", "container", "used", "available"),
    [(8, None, None, 8), (8, 4, 1, 3), (8, 16, 1, 8), (8, 16, 12, 4), (8, 4, 5, 0)],
)
def test_what_is_available(
    machine: int, container: int | None, used: int | None, available: int
) -> None:
    assert MemoryLimits(machine, container, used, None).available_bytes == available


def test_a_sum_that_does_not_fit_is_told_with_its_parts() -> None:
    limits = MemoryLimits(64 * GIB, 32 * GIB, 12 * GIB, None)
    planned = ((4, 5 * GIB, "host_bytes, per rank"), (1, GIB, "staging_bytes"))
    told = limits.shortage(planned, [(5 * GIB, 0)])
    assert "4 × 5,368,709,120 (host_bytes, per rank) + 1 × 1,073,741,824 (staging_bytes)" in told
    assert "= 22,548,578,304 bytes are needed on this host, and 21,474,836,480 are" in told
    assert limits.shortage(planned[:1], [(5 * GIB, 0)]) == ""


def test_slabs_of_other_engines_are_told_by_their_sizes() -> None:
    limits = MemoryLimits(16 * GIB, None, None, None)
    slabs = [(8 * GIB, GIB), (8 * GIB, 0), (2 * GIB, 0)]
    told = limits.shortage(((1, 2 * GIB, "host_bytes, per rank"),), slabs)
    assert "2 × 8,589,934,592 (slabs on this host) + 1 × 2,147,483,648 (slabs" in told
    assert "17,179,869,184 + " not in told
    assert "18,253,611,008 are available here. s3kv has taken 1,073,741,824 alr" in told


def test_what_slabs_have_taken_changes_no_answer() -> None:
    """The memory that a rank has taken is gone from what is available, and still its."""
    for taken in (0, GIB, 4 * GIB):
        for short, spare in ((True, 8 * GIB - 1), (False, 8 * GIB)):
            limits = MemoryLimits(64 * GIB, 32 * GIB, 32 * GIB - spare + taken, None)
            assert bool(limits.shortage(((2, 4 * GIB, "host_bytes"),), [(4 * GIB, taken)])) is short


def test_what_a_process_may_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, locked in [(resource.RLIM_INFINITY, None), (65536, 65536)]:
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=limit: (soft, soft))
        assert memory_limits().locked_bytes == locked


def test_in_words() -> None:
    told = str(MemoryLimits(64 * GIB, 16 * GIB, 4 * GIB, 8192))
    assert "17,179,869,184 and uses 4,294,967,296" in told
    assert "may lock 8,192 (ulimit -l)" in told
    assert "container" not in str(MemoryLimits(64 * GIB, None, None, None))
