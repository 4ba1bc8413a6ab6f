"""What torch finds of GPUs here: `python -m s3kv.device.probe` prints it as one line of JSON.

A program of its own, so that whoever asks imports no torch and keeps no context on the GPU.
"""

from __future__ import annotations

import json
from typing import Any

import torch

PINNED_BYTES = 64 * 2**20
"""As much as is pinned for a try: many times what a process may lock by default."""


def look() -> dict[str, Any]:
    """torch, cuda: versions, cuda None in a build without. device: the name of the first GPU, None
    without one. pinned_bytes: how much of `PINNED_BYTES` could be pinned, as a worker pins its
    slab, and `where` on this machine. refusal, remedy: why not all of it, and what to do; empty
    otherwise."""
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "device": None,
        "wanted_bytes": PINNED_BYTES,
        "pinned_bytes": 0,
        "where": "",
        "refusal": "",
        "remedy": "",
    }
    if not torch.cuda.is_available():
        return found
    device = torch.device("cuda", 0)
    found["device"] = torch.cuda.get_device_name(device)
    return found | _try_to_pin(device)


def _try_to_pin(device: torch.device) -> dict[str, Any]:
    from s3kv.device.nearby import memory_near
    from s3kv.device.pinning import register, unpin
    from s3kv.host.slab import Slab

    near = memory_near(device)
    slab = Slab.create(PINNED_BYTES, node=near)
    torch.cuda.set_device(device)
    torch.zeros(1, device=device)  # makes the context that pages are pinned for
    memory = torch.frombuffer(slab.view, dtype=torch.uint8)
    registered, refusal = register(memory, PINNED_BYTES, device)
    found: dict[str, Any] = {"pinned_bytes": sum(registered.values()), "where": near.because}
    unpin(registered)
    if refusal is not None:
        found |= {"refusal": refusal.reason, "remedy": refusal.remedy}
    return found


if __name__ == "__main__":
    print(json.dumps(look()))
