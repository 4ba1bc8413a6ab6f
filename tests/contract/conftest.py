"""vLLM is imported here, once, with its own libraries' deprecations ignored."""

from __future__ import annotations

import importlib.util
import os
import warnings

collect_ignore_glob: list[str] = []

if importlib.util.find_spec("vllm") is not None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import vllm.v1.core.sched.scheduler  # noqa: F401
elif os.environ.get("CI"):
    raise RuntimeError("vLLM is not installed, and on CI it has to be")
else:
    collect_ignore_glob.append("test_*.py")
