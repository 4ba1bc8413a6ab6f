"""On which NUMA node the pages of a mapping should be, and asking Linux for it.

The policy of a shared mapping of a memory file belongs to the file (`mbind(2)`; tmpfs keeps it
with the inode): asked for once, before anything is touched, it holds for every process that maps
the file, whichever of them touches a page first. It is a preference. A node that is full costs
speed, not memory.
"""

from __future__ import annotations

import ctypes
import os
import platform
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")
_NODES = "sys/devices/system/node"
_MBIND = {"x86_64": 237, "aarch64": 235}
"""The number of the system call, by machine; the C library has no function for it."""
_MPOL_PREFERRED = 1
_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


@dataclass(frozen=True, slots=True)
class NodeChoice:
    """node: None to leave it to Linux, which takes that of who touches a page first.
    because: in words, for the log. processors: those of the node.
    """

    node: int | None
    because: str
    processors: frozenset[int] = frozenset()


FIRST_TOUCH = NodeChoice(None, "on the NUMA node of who touches it first")


def node_near(pci_address: str | None, root: Path = ROOT) -> NodeChoice:
    """The node of a device ("0000:5e:00.0"; None: not known). root: where /sys is.

    A node without processors of its own is none we choose: it is the memory of a GPU, or far away.
    """
    try:
        nodes = _ids(root / _NODES / "has_cpu") & _ids(root / _NODES / "has_memory")
    except (OSError, ValueError):
        return NodeChoice(None, "on any NUMA node, for Linux tells none")
    if len(nodes) < 2:
        return NodeChoice(None, "on the one NUMA node there is")
    if pci_address is None:
        return NodeChoice(None, "on any NUMA node, for the GPU's place on the bus is not known")
    try:
        node = int((root / "sys/bus/pci/devices" / pci_address / "numa_node").read_text("ascii"))
    except (OSError, ValueError):
        node = -1
    if node not in nodes:
        return NodeChoice(None, f"on any NUMA node, for Linux tells none of GPU {pci_address}")
    processors = frozenset(_ids(root / _NODES / f"node{node}" / "cpulist"))
    return NodeChoice(node, f"on NUMA node {node}, that of GPU {pci_address}", processors)


def prefer_node(address: int, nbytes: int, node: int) -> str:
    """Have the pages of a mapping, not touched yet, come from a node while it has some.

    Returns why that was refused, or "". Containers often forbid it.
    """
    number = _MBIND.get(platform.machine())
    if number is None:
        return f"s3kv does not know how to ask for it on {platform.machine()}"
    libc = ctypes.CDLL(None, use_errno=True)
    mask = node_mask(node)
    # The kernel reads one bit less than it is told.
    refused = libc.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(nbytes),
        ctypes.c_int(_MPOL_PREFERRED),
        ctypes.byref(mask),
        ctypes.c_ulong(len(mask) * _BITS + 1),
        ctypes.c_uint(0),
    )
    return f"mbind: {os.strerror(ctypes.get_errno())}" if refused else ""


def node_mask(node: int) -> ctypes.Array[ctypes.c_ulong]:
    """The set of one node, as the kernel reads it."""
    mask = (ctypes.c_ulong * (node // _BITS + 1))()
    mask[node // _BITS] = 1 << (node % _BITS)
    return mask


def _ids(path: Path) -> set[int]:
    """A list such as "0-1,4", as Linux writes it; nothing is an empty one."""
    found: set[int] = set()
    for part in path.read_text("ascii").split(","):
        first, _, last = part.strip().partition("-")
        if first:
            found.update(range(int(first), int(last or first) + 1))
    return found
