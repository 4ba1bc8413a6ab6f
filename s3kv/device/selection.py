"""Device selection: check of the device a caller has named, and choice of host memory near it."""

from __future__ import annotations

from typing import Any

import torch

from s3kv.errors import UnsupportedError
from s3kv.host.placement import FIRST_TOUCH, NodeChoice, node_near


def chosen_device(device: str | torch.device) -> torch.device:
    """The device as torch's object. Raises `UnsupportedError` unless it is the CPU or a GPU that
    torch can use here.
    """
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise UnsupportedError(f"device is {device!r}: allowed is 'cpu' or 'cuda'") from error
    if found.type == "cpu":
        return found
    gpus = torch.cuda.device_count() if found.type == "cuda" and torch.cuda.is_available() else 0
    if (found.index or 0) >= gpus:
        raise UnsupportedError(
            f"device is {str(device)!r}: allowed is 'cpu' or one of the {gpus} GPUs that torch "
            f"{torch.__version__} can use here"
        )
    return found


def memory_near(device: torch.device) -> NodeChoice:
    """The NUMA node for host memory that is copied to and from `device`.

    For a GPU it is the node the GPU is attached to: a copy by the wrong one crosses the link
    between sockets. vLLM's CPU worker has bound itself to a node, and its I/O process inherits it.
    """
    return node_near(pci_address(device)) if device.type == "cuda" else FIRST_TOUCH


def pci_address(device: torch.device) -> str | None:
    """The device's name under /sys/bus/pci/devices; None where torch does not tell."""
    # torch's type stubs do not have these fields, and not every build does.
    found: Any = torch.cuda.get_device_properties(device)
    try:
        bus = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}"
    except AttributeError:
        return None
    # Torch does not tell the PCI function; a GPU's own is 0.
    return f"{bus}.0"
