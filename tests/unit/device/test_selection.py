"""Host memory near a device."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from s3kv.device import selection
from s3kv.device.selection import memory_near, pci_address
from s3kv.host.placement import FIRST_TOUCH, NodeChoice


@pytest.mark.parametrize(
    ("told", "address"),
    [({"pci_domain_id": 0, "pci_bus_id": 0x5E, "pci_device_id": 1}, "0000:5e:01.0"), ({}, None)],
    ids=["told", "a build of torch that does not tell"],
)
def test_a_gpu_is_named_as_linux_names_it(
    monkeypatch: pytest.MonkeyPatch, told: dict[str, int], address: str | None
) -> None:
    found = SimpleNamespace(**told)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    assert pci_address(torch.device("cuda", 0)) == address


def test_memory_is_wanted_near_a_gpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = NodeChoice(1, "near it")
    monkeypatch.setattr(selection, "pci_address", lambda device: "0000:5e:01.0")
    monkeypatch.setattr(selection, "node_near", {"0000:5e:01.0": choice}.__getitem__)
    assert memory_near(torch.device("cuda", 0)) is choice
    assert memory_near(torch.device("cpu")) is FIRST_TOUCH


@pytest.mark.gpu
def test_linux_knows_this_gpu_by_that_name() -> None:
    assert Path("/sys/bus/pci/devices", pci_address(torch.device("cuda", 0)), "numa_node").exists()
