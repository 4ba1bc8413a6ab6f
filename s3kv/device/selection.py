"""Choice of host memory near a device."""

from __future__ import annotations

from typing import Any

import torch

from s3kv.host.placement import FIRST_TOUCH, NodeChoice, node_near


def memory_near(device: torch.device) -> NodeChoice:
    """The NUMA node for host memory that is copied to and from `device`.

    For a GPU it is the node that the GPU is attached to: with another node, a copy crosses the link
    between sockets. vLLM's CPU worker binds itself to a node, and its I/O process inherits that.
    """
    return node_near(pci_address(device)) if device.type == "cuda" else FIRST_TOUCH


def pci_address(device: torch.device) -> str | None:
    """The device's name under /sys/bus/pci/devices; None if torch does not report it."""
    # torch's type stubs do not have these fields, and not every build does.
    found: Any = torch.cuda.get_device_properties(device)
    try:
        bus = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}"
    except AttributeError:
        return None
    # Torch does not report the PCI function; a GPU's own is 0.
    return f"{bus}.0"
