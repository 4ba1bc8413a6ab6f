"""vLLM's second-generation model runner on a machine without a GPU: `Engine(second_runner=True)`.

vLLM's CPU worker takes that runner if Triton has a backend called "cpu". The runner's kernels are
few and small, and Triton's own interpreter runs them as Python. So the backend here compiles
nothing: `compiler` and `driver` are what Triton imports of a backend.

Triton finds it by the entry point in `path`, a folder that only the engines for this runner have on
their PYTHONPATH. To every other engine Triton stays what it is without this package: unusable.
"""

from __future__ import annotations

import os
from pathlib import Path

PATH = Path(__file__).resolve().parent / "path"


def interpreted_triton(python_path: str) -> dict[str, str]:
    """The variables of an engine with this runner. python_path: its PYTHONPATH without it."""
    return {
        "PYTHONPATH": os.pathsep.join([python_path, str(PATH)]),
        "TRITON_INTERPRET": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
    }
