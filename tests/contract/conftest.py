"""vLLM is imported here, once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab import models
from lab.constants import changed
from tests.mutants import Patch
from tests.vllm_import import import_vllm

collect_ignore_glob = [] if import_vllm() else ["test_*.py"]


@pytest.fixture(autouse=True)
def patient() -> Iterator[None]:
    """No request gives up waiting because computing would be faster."""
    with changed(recompute_gate=False):
        yield


@pytest.fixture(scope="session", autouse=True)
def _own_log() -> Iterator[None]:
    """No connector hands the log of s3kv to vLLM's: other tests of the process read it."""
    from s3kv.connectors import ec, kv, offload_tier

    with pytest.MonkeyPatch.context() as patch:
        for module in (ec, kv, offload_tier):
            patch.setattr(module, "join_vllm_log", lambda: None)
        yield


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def tiny_config(directory: Path) -> Any:
    from tests.contract.configurations import configured

    return configured(models.build(directory, models.TINY))


@pytest.fixture
def engine(tiny_config: Any, monkeypatch: Patch, directory: Path, tmp_path: Path) -> Any:
    from tests.contract.fingerprints import an_engine

    return an_engine(tiny_config, monkeypatch, directory, tmp_path / "model")
