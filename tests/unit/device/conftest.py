"""The suite runs on every kind of device; what needs a GPU is deselected where there is none."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch

from tests.unit.device.devices import GPUS, KINDS, Device, make_device


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu:
        items[:] = [item for item in items if item not in gpu]
        config.hook.pytest_deselected(items=gpu)


def param(kind: str) -> Any:
    return pytest.param(kind, marks=pytest.mark.gpu if kind.startswith("cuda") else ())


@pytest.fixture(params=map(param, KINDS))
def device(request: pytest.FixtureRequest) -> Device:
    """`S3KV_SEED` chooses what a simulated GPU does; without it every run tries something else."""
    return make(request.param)


@pytest.fixture(params=map(param, GPUS))
def gpu(request: pytest.FixtureRequest) -> Device:
    """As `device`, where there are streams."""
    return make(request.param)


def make(kind: str) -> Device:
    seed = int(os.environ.get("S3KV_SEED", random.SystemRandom().randrange(2**32)))
    print(f"S3KV_SEED={seed}")
    return make_device(kind, seed)
