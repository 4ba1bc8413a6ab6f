"""vLLM is imported here, once, with its own libraries' deprecations ignored."""

from __future__ import annotations

import importlib.util
import os
import warnings
from pathlib import Path
from typing import Any

import pytest

from lab import models

collect_ignore_glob: list[str] = []

if importlib.util.find_spec("vllm") is not None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import vllm.v1.core.sched.scheduler  # noqa: F401
elif os.environ.get("CI"):
    raise RuntimeError("vLLM is not installed, and on CI it has to be")
else:
    collect_ignore_glob.append("test_*.py")


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def tiny_config(directory: Path) -> Any:
    from tests.contract.configurations import configured

    return configured(models.build(directory, models.TINY))
