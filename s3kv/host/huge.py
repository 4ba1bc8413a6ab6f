"""Huge pages for a memory file: asked for with `madvise(2)`, given as the machine is set up.

Linux gives shared memory none unless it is told to, in
/sys/kernel/mm/transparent_hugepage/shmem_enabled, where most distributions say "never".
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path("/")
SETTING = "sys/kernel/mm/transparent_hugepage"
_GIVING = ("always", "within_size", "advise", "force")


def shmem_policy(root: Path = ROOT) -> str | None:
    """What Linux does when shared memory asks for huge pages of the usual size, as it calls it
    itself; None: this kernel has none. root: where /sys is.
    """
    overall = _selected(root / SETTING / "shmem_enabled")
    if overall in (None, "deny", "force"):
        return overall
    # Newer kernels have a setting for each size, which may refer to the one for all.
    try:
        size_bytes = int((root / SETTING / "hpage_pmd_size").read_text("ascii"))
    except (OSError, ValueError):
        return overall
    own = _selected(root / SETTING / f"hugepages-{size_bytes // 1024}kB" / "shmem_enabled")
    return overall if own in (None, "inherit") else own


def gives_huge_pages(policy: str | None) -> bool:
    """Whether memory that asks gets huge pages, as far as there are any."""
    return policy in _GIVING


def _selected(path: Path) -> str | None:
    """The word in brackets."""
    try:
        words = path.read_text("ascii").split()
    except OSError:
        return None
    return next((word.strip("[]") for word in words if word.startswith("[")), None)
