"""vLLM is imported here, once, with its own libraries' deprecations ignored."""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab import models
from lab.constants import changed

collect_ignore_glob: list[str] = []

if importlib.util.find_spec("vllm") is not None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import vllm.v1.core.sched.scheduler  # noqa: F401
elif os.environ.get("CI"):
    raise RuntimeError("vLLM is not installed, and on CI it has to be")
else:
    collect_ignore_glob.append("test_*.py")


@pytest.fixture(autouse=True)
def patient() -> Iterator[None]:
    """No request gives up waiting because computing would be faster."""
    with changed(recompute_gate=False):
        yield


@pytest.fixture(scope="session", autouse=True)
def _own_log() -> Iterator[None]:
    """A tier does not hand the log of s3kv to vLLM's: other tests of the process read it."""
    from s3kv.connectors import offload_tier

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offload_tier, "join_vllm_log", lambda: None)
        yield


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def tiny_config(directory: Path) -> Any:
    from tests.contract.configurations import configured

    return configured(models.build(directory, models.TINY))
