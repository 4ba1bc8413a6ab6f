"""The bucket of a test, of the kind that its module has, and how its objects are read."""

from __future__ import annotations

from typing import Any

import pytest

from lab.memory_store import MemoryStore


@pytest.fixture
def bucket(request: pytest.FixtureRequest) -> Any:
    """The module's own `Bucket`, where it has one."""
    return getattr(request.module, "Bucket", MemoryStore)()


@pytest.fixture(params=["whole", "ranges"])
def range_bytes(request: pytest.FixtureRequest) -> int:
    """0, or the module's `PART_BYTES`."""
    return request.module.PART_BYTES if request.param == "ranges" else 0
