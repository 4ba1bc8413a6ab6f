"""As in tests/unit/device: what needs a GPU is deselected where there is none."""

from __future__ import annotations

from tests.unit.device.conftest import device, gpu, pytest_collection_modifyitems

__all__ = ["device", "gpu", "pytest_collection_modifyitems"]
