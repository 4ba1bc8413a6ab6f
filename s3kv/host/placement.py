"""Placement of memory and work on a machine: NUMA nodes, huge pages, processors.

The NUMA policy of a shared mapping of a memory file belongs to the file (`mbind(2)`; tmpfs keeps it
with the inode). Set once, before any page is touched, it holds for every process that maps the
file. It is a preference: if the node is full, pages come from another one and copies are slower.

Huge pages are requested with `madvise(2)`. Linux gives shared memory none unless
/sys/kernel/mm/transparent_hugepage/shmem_enabled allows it, and most distributions set that to
"never".
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import platform
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")
SETTING = "sys/kernel/mm/transparent_hugepage"
_GIVING = ("always", "within_size", "advise", "force")
_NODES = "sys/devices/system/node"
_MBIND = {"x86_64": 237, "aarch64": 235}
"""Number of the system call by machine; the C library has no function for it."""
_MPOL_PREFERRED = 1
_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


@dataclass(frozen=True, slots=True)
class NodeChoice:
    """A choice of node. node: its number; None leaves it to Linux, which takes the node of the
    process that first touches a page. because: the reason, for the log. processors: the node's
    processors."""

    node: int | None
    because: str
    processors: frozenset[int] = frozenset()


FIRST_TOUCH = NodeChoice(None, "on the NUMA node of the process that first touches it")


def node_near(pci_address: str | None, root: Path = ROOT) -> NodeChoice:
    """The node of the device at `pci_address` ("0000:5e:00.0"; None if not known). root: parent
    directory of /sys.

    A node without processors is never chosen: it is the memory of a GPU, or remote.
    """
    try:
        nodes = _ids(root / _NODES / "has_cpu") & _ids(root / _NODES / "has_memory")
    except (OSError, ValueError):
        return NodeChoice(None, "on any NUMA node (the kernel reports no topology)")
    if len(nodes) < 2:
        return NodeChoice(None, "on the only NUMA node")
    if pci_address is None:
        return NodeChoice(None, "on any NUMA node (the GPU's PCI address is not known)")
    try:
        node = int((root / "sys/bus/pci/devices" / pci_address / "numa_node").read_text("ascii"))
    except (OSError, ValueError):
        node = -1
    if node not in nodes:
        return NodeChoice(None, f"on any NUMA node (the kernel reports none for GPU {pci_address})")
    processors = frozenset(_ids(root / _NODES / f"node{node}" / "cpulist"))
    return NodeChoice(node, f"on NUMA node {node}, that of GPU {pci_address}", processors)


def prefer_node(address: int, nbytes: int, node: int) -> str:
    """Ask Linux to take the untouched pages of a mapping from a node while it has free pages.
    Returns the reason for a refusal, or "". Containers often forbid this call."""
    number = _MBIND.get(platform.machine())
    if number is None:
        return f"s3kv does not know the number of mbind on {platform.machine()}"
    libc = ctypes.CDLL(None, use_errno=True)
    mask = node_mask(node)
    # The kernel reads one bit fewer than this argument states.
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
    """Bit mask of one node, in the kernel's format."""
    mask = (ctypes.c_ulong * (node // _BITS + 1))()
    mask[node // _BITS] = 1 << (node % _BITS)
    return mask


def _ids(path: Path) -> set[int]:
    """The numbers in a file with a Linux list such as "0-1,4"; none in an empty file."""
    found: set[int] = set()
    for part in path.read_text("ascii").split(","):
        first, _, last = part.strip().partition("-")
        if first:
            found.update(range(int(first), int(last or first) + 1))
    return found


def shmem_policy(root: Path = ROOT) -> str | None:
    """Linux's policy word for shared memory that requests huge pages of the usual size; None if
    this kernel has none. root: parent directory of /sys."""
    overall = _selected(root / SETTING / "shmem_enabled")
    if overall in (None, "deny", "force"):
        return overall
    # Newer kernels have a setting per size, which may inherit the common one.
    try:
        size_bytes = int((root / SETTING / "hpage_pmd_size").read_text("ascii"))
    except (OSError, ValueError):
        return overall
    own = _selected(root / SETTING / f"hugepages-{size_bytes // 1024}kB" / "shmem_enabled")
    return overall if own in (None, "inherit") else own


def gives_huge_pages(policy: str | None) -> bool:
    """Whether memory gets huge pages on request, while Linux has any."""
    return policy in _GIVING


def _selected(path: Path) -> str | None:
    """The word in brackets."""
    try:
        words = path.read_text("ascii").split()
    except OSError:
        return None
    return next((word.strip("[]") for word in words if word.startswith("[")), None)


def beside_the_model() -> frozenset[int]:
    """Processors of the calling thread and, if readable, of the engine's core process.

    vLLM's CPU worker has OpenMP bind its threads to cores, the one that calls us included, and
    leaves some cores free for other work. Threads and processes inherit the binding, so whatever
    such a thread starts would run only on the computing cores.
    """
    processors = frozenset(os.sched_getaffinity(0))
    core = multiprocessing.parent_process()
    if core is None or core.pid is None:
        return processors
    try:
        return processors | os.sched_getaffinity(core.pid)
    except OSError:  # the core process is gone, or reading is not permitted
        return processors
