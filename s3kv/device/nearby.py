"""Host memory that is near a device."""

from __future__ import annotations

from typing import Any

import torch

from s3kv.host.numa import FIRST_TOUCH, NodeChoice, node_near


def memory_near(device: torch.device) -> NodeChoice:
    """On which NUMA node host memory should be that is copied to and from `device`.

    For a GPU the node it is attached to: a copy by the wrong one crosses the link between sockets,
    which everything else uses, too. For caches in host memory there is nothing to choose: vLLM's
    worker for CPUs has bound itself to a node, strictly, and its I/O process inherits that.
    """
    return node_near(pci_address(device)) if device.type == "cuda" else FIRST_TOUCH


def pci_address(device: torch.device) -> str | None:
    """As Linux names it under /sys/bus/pci/devices; None where torch does not tell."""
    # torch's type stubs do not have these fields, and not every build does.
    found: Any = torch.cuda.get_device_properties(device)
    try:
        bus = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}"
    except AttributeError:
        return None
    # The function is not told; a GPU has its own at 0.
    return f"{bus}.0"
