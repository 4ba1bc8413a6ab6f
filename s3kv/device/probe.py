"""GPU probe: `python -m s3kv.device.probe` prints what torch finds here as one line of JSON.

It is a separate program, so that its caller imports no torch and keeps no context on the GPU.
"""

from __future__ import annotations

import json
from typing import Any

import torch

PINNED_BYTES = 64 * 2**20
"""Size of the trial pinning: many times what a process may lock by default."""


def look() -> dict[str, Any]:
    """The findings, as plain data.

    torch, cuda: versions; cuda is None in a build without CUDA. device: the name of the first GPU;
    None without one. pinned_bytes: how many of `wanted_bytes` could be pinned, as a worker pins its
    slab. where: on which NUMA node of this machine. refusal, remedy: why not all of them, and what
    to do about it; empty if all were.
    """
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "device": None,
        "wanted_bytes": PINNED_BYTES,
        "pinned_bytes": 0,
    } | dict.fromkeys(("where", "refusal", "remedy"), "")
    if not torch.cuda.is_available():
        return found
    device = torch.device("cuda", 0)
    found["device"] = torch.cuda.get_device_name(device)
    return found | _try_to_pin(device)


def _try_to_pin(device: torch.device) -> dict[str, Any]:
    from s3kv.device.gpu.pinning import register, unpin
    from s3kv.device.selection import memory_near
    from s3kv.host.slab import Slab

    near = memory_near(device)
    slab = Slab.create(PINNED_BYTES, node=near)
    torch.cuda.set_device(device)
    torch.zeros(1, device=device)  # creates the context that pages are pinned for
    memory = torch.frombuffer(slab.view, dtype=torch.uint8)
    registered, refusal = register(memory, PINNED_BYTES, device)
    found: dict[str, Any] = {"pinned_bytes": sum(registered.values()), "where": near.because}
    unpin(registered)
    if refusal is not None:
        found |= {"refusal": refusal.reason, "remedy": refusal.remedy}
    return found


if __name__ == "__main__":
    print(json.dumps(look()))
