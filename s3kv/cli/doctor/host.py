"""Checks of this host for an engine: memory and its limits, the hash seed, vLLM and the GPU.

Neither vLLM nor torch is imported: a separate process queries torch about the GPU.
"""

from __future__ import annotations

import contextlib
import glob
import importlib.util
import json
import os
import re
import shlex
import stat
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import vllm_s3kv
from s3kv.cli.doctor.findings import Finding
from s3kv.config import Config, size
from s3kv.errors import ConfigError
from s3kv.host.limits import memory_limits
from s3kv.host.slab import Slab, existing_slabs
from s3kv.objects import compression

SUPPORTED = (vllm_s3kv.FIRST_VLLM, (0, 34))
"""Supported vLLM versions: the first one, and the first unsupported one, as in pyproject.toml."""
SHM = "/dev/shm"
MORE_SHM = (
    f"make {SHM} larger: docker run --shm-size or --ipc=host; in Kubernetes an emptyDir with "
    "medium: Memory mounted there (`s3kv doctor` names files of killed engines there)"
)
_SHM_BYTES_PER_WORKER = 256 * 2**20
"""vLLM's queues between its processes: ten pieces of 16 or 24 MiB each (its `shm_broadcast`)."""
_PROBE = (sys.executable, "-m", "s3kv.device.probe")
_PROBE_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Host:
    """Facts about a host. available_bytes: memory that a process can still get, plus the slabs of
    running engines. slab_error: why no memory file can be created; empty if one can. shm_bytes:
    size of /dev/shm; None if it is missing. memlock_bytes: bytes that a process may lock; None: no
    limit. hash_seed: PYTHONHASHSEED. vllm: version of the installed vLLM; None without one.
    decoded_bytes_per_s: of compressed chunks by one thread; None without blosc2. gpu: the findings
    of `s3kv.device.probe`, or the reason why there are none. left: `left_by_kills`."""

    available_bytes: int
    slab_error: str
    shm_bytes: int | None
    memlock_bytes: int | None
    hash_seed: str | None
    vllm: str | None
    decoded_bytes_per_s: float | None
    gpu: Mapping[str, Any] | str
    left: Finding


def look(environment: Mapping[str, str]) -> Host:
    """Collect the facts about this host. Creates a memory file of one page, and closes it."""
    limits = memory_limits()
    codec = compression.codec()
    return Host(
        available_bytes=limits.available_bytes + sum(taken for _, taken in existing_slabs()),
        slab_error=_slab_error(),
        shm_bytes=_size_of(SHM),
        memlock_bytes=limits.locked_bytes,
        hash_seed=environment.get("PYTHONHASHSEED"),
        vllm=vllm_s3kv.vllm_version(),
        decoded_bytes_per_s=compression.decoding_speed(codec, time.perf_counter) if codec else None,
        gpu=_look_for_gpu(),
        left=left_by_kills(),
    )


def examine(
    config: Config, host: Host, *, workers: int, algorithm: str, tier_bytes: int | None = None
) -> list[Finding]:
    """Check the facts about a host. Pure. workers: of all engines on this host. algorithm: vLLM's
    prefix_caching_hash_algo. tier_bytes: that of `with_tier_bytes`, for one engine."""
    return [
        _memory(config, host, workers, tier_bytes),
        _shm(host, workers, tier_bytes or 0),
        host.left,
        _memlock(host, config.host_bytes if tier_bytes is None else tier_bytes),
        _hash_seed(host.hash_seed, algorithm),
        _vllm(host.vllm),
        _compression(config, host.decoded_bytes_per_s),
        _gpu(host.gpu),
    ]


def _memory(config: Config, host: Host, workers: int, tier_bytes: int | None) -> Finding:
    if tier_bytes == 0:
        told = "cpu_bytes_to_use, a number, is not given, and vLLM does not start without it"
        return Finding("memory", "warning", told, "give --config all of --kv-transfer-config")
    if host.slab_error and tier_bytes is None:
        remedy = "allow memfd_create(2) and its sealing: a seccomp profile may forbid them"
        return Finding("memory", "fault", host.slab_error, remedy)
    name, given, times = "host_bytes", config.host_bytes, workers
    if tier_bytes is not None:
        name, given, times = "cpu_bytes_to_use", tier_bytes, 1
    each = f"{given:,}" if times == 1 else f"{given:,} × {times} workers"
    told = f"{name} is {each}; {host.available_bytes:,} bytes are available"
    if given * times <= host.available_bytes:
        return Finding("memory", "ok", told)
    remedy = f"set {name} lower, or give the container more memory"
    return Finding("memory", "fault", told, remedy)


def _shm(host: Host, workers: int, tier_bytes: int) -> Finding:
    if workers == 1 and not tier_bytes:
        return Finding("shm", "ok", f"with one worker only vLLM's OffloadingConnector uses {SHM}")
    wanted = _SHM_BYTES_PER_WORKER * workers * (workers > 1) + tier_bytes
    takes = [f"the queues of {workers} workers"] * (workers > 1)
    takes += ["cpu_bytes_to_use"] * (tier_bytes > 0)
    told = f"vLLM may take {wanted:,} for {' and '.join(takes)}"
    if host.shm_bytes is None:
        return Finding("shm", "fault", f"{SHM} does not exist, and {told}", MORE_SHM)
    told = f"{SHM} has {host.shm_bytes:,} bytes; {told}"
    if host.shm_bytes < wanted:
        return Finding("shm", "fault" if host.shm_bytes < tier_bytes else "warning", told, MORE_SHM)
    return Finding("shm", "ok", told)


def _memlock(host: Host, pinned_bytes: int) -> Finding:
    limit = host.memlock_bytes
    if limit is None:
        return Finding("memlock", "ok", "a process may lock any amount of memory")
    told = f"a process may lock {limit:,} bytes of memory"
    if isinstance(host.gpu, str) or host.gpu["device"] is None:
        return Finding("memlock", "ok", f"{told}; only pinning for a GPU would need more")
    if limit >= pinned_bytes:
        return Finding("memlock", "ok", told)
    if host.gpu["pinned_bytes"] > limit:
        return Finding("memlock", "ok", f"{told}; this driver does not count pinned memory")
    told += f", and a worker pins {pinned_bytes:,}: a driver may refuse that"
    remedy = "raise it: ulimit -l unlimited, LimitMEMLOCK=infinity, docker run --ulimit memlock=-1"
    return Finding("memlock", "warning", told, remedy)


def _hash_seed(seed: str | None, algorithm: str) -> Finding:
    same = "set it to the same number on all instances"
    if seed is None and algorithm.startswith("xxhash"):
        told = (
            f"PYTHONHASHSEED is not set, and prefix_caching_hash_algo is {algorithm!r}: every "
            "process hashes with a seed of its own, and finds no chunk of another"
        )
        return Finding("hash seed", "fault", told, f"{same}, or use sha256_cbor")
    if seed == "random":
        return Finding("hash seed", "warning", "PYTHONHASHSEED is 'random'", f"{same}, or unset it")
    told = f"PYTHONHASHSEED is {seed!r}: instances with another do not share the cache"
    if seed is None:
        told = f"PYTHONHASHSEED is not set, as {algorithm} allows (--hash-algo: the engine's)"
    return Finding("hash seed", "ok", told)


def _vllm(version: str | None) -> Finding:
    first, end = (".".join(map(str, bound)) for bound in SUPPORTED)
    remedy = f"pip install 'vllm>={first},<{end}'"
    if version is None:
        return Finding("vllm", "skipped", "vLLM is not installed in this Python")
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        told = f"vLLM calls itself {version!r}, which is not a release"
        return Finding("vllm", "warning", told, remedy)
    if SUPPORTED[0] <= (int(match[1]), int(match[2])) < SUPPORTED[1]:
        return Finding("vllm", "ok", f"vLLM {version}")
    told = vllm_s3kv.refusal(version) or f"vLLM {version} is not supported"
    return Finding("vllm", "fault", told, remedy)


def _compression(config: Config, decoded_bytes_per_s: float | None) -> Finding:
    told = f"compress is {config.compress!r}"
    if decoded_bytes_per_s is None and config.compress == "on":
        return Finding("compression", "fault", f"{told}, without blosc2", compression.REMEDY)
    if decoded_bytes_per_s is None:
        told += ", without blosc2: compressed chunks of other engines are misses here "
        return Finding("compression", "ok", f"{told}({compression.REMEDY})")
    told += f"; one thread decodes {decoded_bytes_per_s / 1e9:.1f} GB/s of chunks like bf16"
    return Finding("compression", "ok", told)


def _gpu(found: Mapping[str, Any] | str) -> Finding:
    if isinstance(found, str):
        return Finding("gpu", "skipped", found)
    told = f"torch {found['torch']}"
    if found["cuda"] is None:
        return Finding("gpu", "ok", f"{told}, a build for CPUs")
    told += f" for CUDA {found['cuda']}"
    if found["device"] is None:
        remedy = "check nvidia-smi, and --gpus or the device plugin of the container"
        return Finding("gpu", "warning", f"{told} finds no GPU", remedy)
    told += f", {found['device']}"
    if found["pinned_bytes"] < found["wanted_bytes"]:
        told += ": host memory cannot be pinned, and copies will be several times slower: "
        return Finding("gpu", "warning", f"{told}{found['refusal']}", found["remedy"])
    return Finding("gpu", "ok", f"{told}; host memory can be pinned, {found['where']}")


def left_by_kills() -> Finding:
    """Finding about files of vLLM's host tiers that no process maps: engines that are killed leave
    them (vllm#57303). Only files of this user; processes of other containers are not seen."""
    left = {}
    for file in glob.glob(f"{SHM}/vllm_offload_*.mmap*"):
        with contextlib.suppress(OSError):  # gone; every user may give files such names there
            found = os.lstat(file)
            if stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid() and file.isascii():
                left[file] = found.st_blocks * 512
    for process in glob.glob("/proc/[0-9]*/maps") if left else ():
        with contextlib.suppress(OSError):
            maps = Path(process).read_bytes()
            left = {file: n for file, n in left.items() if Path(file).name.encode() not in maps}
    if not left:
        return Finding("killed engines", "ok", f"none has left memory in {SHM}")
    told = f"killed engines have left {size(sum(left.values()))} in {SHM}"
    remedy = f"rm {shlex.join(left)}, unless an engine of another container uses them"
    return Finding("killed engines", "warning", told, remedy)


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


def _look_for_gpu() -> Mapping[str, Any] | str:
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed in this Python"
    try:
        done = subprocess.run(
            _PROBE, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"torch did not answer within {_PROBE_TIMEOUT_S:.0f} s"
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return f"torch cannot be queried: {last}"
    return dict(json.loads(done.stdout))
