"""Import of vLLM into a test process, with its own libraries' deprecations ignored."""

from __future__ import annotations

import importlib.util
import os
import warnings


def import_vllm() -> bool:
    """Import vLLM. Returns False if it is not installed; on CI it has to be."""
    if importlib.util.find_spec("vllm") is None:
        if os.environ.get("CI"):
            raise RuntimeError("vLLM is not installed, and on CI it has to be")
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import vllm.v1.core.sched.scheduler  # noqa: F401
    return True
