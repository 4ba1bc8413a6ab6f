"""What of this host matters to an engine here: memory, its limits, and the seed of hashes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from s3kv.cli.doctor.findings import Finding
from s3kv.config import Config
from s3kv.errors import ConfigError
from s3kv.host.limits import memory_limits
from s3kv.host.slab import Slab

SHM = "/dev/shm"
_SHM_BYTES_PER_WORKER = 256 * 2**20
"""vLLM's queues between its processes: ten pieces of 16 or 24 MiB each (its `shm_broadcast`)."""


@dataclass(frozen=True, slots=True)
class Host:
    """available_bytes: memory a process could still get. slab_error: why no memory file can be
    made, empty when one can. shm_bytes: the size of /dev/shm, None when there is none.
    memlock_bytes: what a process may lock, None without a limit. hash_seed: PYTHONHASHSEED.
    """

    available_bytes: int
    slab_error: str
    shm_bytes: int | None
    memlock_bytes: int | None
    hash_seed: str | None


def look(environment: Mapping[str, str]) -> Host:
    """This host. Makes a memory file of one page, and closes it."""
    limits = memory_limits()
    return Host(
        available_bytes=limits.available_bytes,
        slab_error=_slab_error(),
        shm_bytes=_size_of(SHM),
        memlock_bytes=limits.locked_bytes,
        hash_seed=environment.get("PYTHONHASHSEED"),
    )


def examine(
    config: Config, host: Host, *, workers: int, algorithm: str, pinned_bytes: int | None
) -> list[Finding]:
    """Pure. workers: of all engines on this host. algorithm: vLLM's prefix_caching_hash_algo.
    pinned_bytes: how much was pinned for a GPU at a try; None without a GPU.
    """
    return [
        _memory(config, host, workers),
        _shm(host, workers),
        _memlock(config, host.memlock_bytes, pinned_bytes),
        _hash_seed(host.hash_seed, algorithm),
    ]


def _memory(config: Config, host: Host, workers: int) -> Finding:
    if host.slab_error:
        remedy = "allow memfd_create(2) and its sealing: a seccomp profile may forbid them"
        return Finding("memory", "fault", host.slab_error, remedy)
    wanted = config.host_bytes * workers
    times = "" if workers == 1 else f" × {workers} workers"
    told = (
        f"host_bytes is {config.host_bytes:,}{times}, {host.available_bytes:,} bytes are available"
    )
    if wanted <= host.available_bytes:
        return Finding("memory", "ok", told)
    remedy = "set host_bytes lower, or give the container more memory"
    return Finding("memory", "fault", told, remedy)


def _shm(host: Host, workers: int) -> Finding:
    if workers == 1:
        told = f"s3kv keeps nothing in {SHM}, nor does vLLM with one worker"
        return Finding("shm", "ok", told)
    remedy = (
        f"make {SHM} larger: docker run --shm-size or --ipc=host; in Kubernetes an emptyDir with "
        "medium: Memory mounted there"
    )
    wanted = _SHM_BYTES_PER_WORKER * workers
    if host.shm_bytes is None:
        told = f"there is no {SHM}, and vLLM needs one for its {workers} workers"
        return Finding("shm", "fault", told, remedy)
    told = f"{SHM} has {host.shm_bytes:,} bytes; vLLM's queues for {workers} workers may take "
    if host.shm_bytes < wanted:
        return Finding("shm", "warning", f"{told}{wanted:,}", remedy)
    return Finding("shm", "ok", f"{told}{wanted:,}")


def _memlock(config: Config, limit: int | None, pinned_bytes: int | None) -> Finding:
    if limit is None:
        return Finding("memlock", "ok", "a process may lock any amount of memory")
    told = f"a process may lock {limit:,} bytes of memory"
    if pinned_bytes is None:
        return Finding("memlock", "ok", f"{told}; only pinning for a GPU would need more")
    if limit >= config.host_bytes:
        return Finding("memlock", "ok", told)
    if pinned_bytes > limit:
        return Finding("memlock", "ok", f"{told}; this driver does not count what it pins")
    told += f", host_bytes is {config.host_bytes:,}: a driver may refuse to pin it all"
    remedy = "raise it: ulimit -l unlimited, LimitMEMLOCK=infinity, docker run --ulimit memlock=-1"
    return Finding("memlock", "warning", told, remedy)


def _hash_seed(seed: str | None, algorithm: str) -> Finding:
    same = "set it to the same number on all instances"
    if seed is None and algorithm.startswith("xxhash"):
        told = (
            f"PYTHONHASHSEED is not set, and prefix_caching_hash_algo is {algorithm!r}: every "
            "process hashes with a seed of its own, and finds nothing of what others have saved"
        )
        return Finding("hash seed", "fault", told, f"{same}, or use sha256_cbor")
    if seed == "random":
        return Finding("hash seed", "warning", "PYTHONHASHSEED is 'random'", f"{same}, or unset it")
    if seed is None:
        told = f"PYTHONHASHSEED is not set, as {algorithm} allows (--hash-algo: the engine's)"
        return Finding("hash seed", "ok", told)
    told = f"PYTHONHASHSEED is {seed!r}: instances with another do not share the cache"
    return Finding("hash seed", "ok", told)


def _slab_error() -> str:
    try:
        Slab.create(1).close()
    except (ConfigError, OSError) as error:
        return f"no memory file for the slab can be made: {error}"
    return ""


def _size_of(directory: str) -> int | None:
    try:
        found = os.statvfs(directory)
    except OSError:
        return None
    return found.f_blocks * found.f_frsize
