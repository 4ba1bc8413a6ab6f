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
    slab."""
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "device": None,
        "wanted_bytes": PINNED_BYTES,
        "pinned_bytes": 0,
    }
    if not torch.cuda.is_available():
        return found
    device = torch.device("cuda", 0)
    found["device"] = torch.cuda.get_device_name(device)
    found["pinned_bytes"] = _pinned_bytes(device)
    return found


def _pinned_bytes(device: torch.device) -> int:
    from s3kv.device.pinning import pin, unpin
    from s3kv.host.slab import Slab

    slab = Slab.create(PINNED_BYTES)
    torch.cuda.set_device(device)
    torch.zeros(1, device=device)  # makes the context that pages are pinned for
    registered = pin(torch.frombuffer(slab.view, dtype=torch.uint8), PINNED_BYTES, device)
    nbytes = sum(registered.values())
    unpin(registered)
    return nbytes


if __name__ == "__main__":
    print(json.dumps(look()))
