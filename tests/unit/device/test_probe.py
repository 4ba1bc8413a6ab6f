"""What is said of the GPU is what a worker would find."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from s3kv.device import selection
from s3kv.device.gpu import pinning
from s3kv.device.gpu.pinning import PinningRefusal
from s3kv.device.probe import PINNED_BYTES, look


def test_it_prints_what_it_finds() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "s3kv.device.probe"], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout)["torch"] == torch.__version__


@pytest.mark.parametrize("refusal", [None, PinningRefusal("no room", "make some")])
def test_what_came_of_pinning_is_in_it(
    monkeypatch: pytest.MonkeyPatch, refusal: PinningRefusal | None
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch, "zeros", lambda *shape, device: None)
    monkeypatch.setattr(selection, "pci_address", lambda device: None)
    pinned = {} if refusal else {0: PINNED_BYTES}
    monkeypatch.setattr(pinning, "register", lambda *args: (dict(pinned), refusal))
    monkeypatch.setattr(pinning, "unpin", lambda registered: registered.clear())
    found = look()
    assert found["device"] == "a GPU"
    assert found["pinned_bytes"] == (0 if refusal else PINNED_BYTES)
    assert "NUMA node" in found["where"]
    said = ("no room", "make some") if refusal else ("", "")
    assert (found["refusal"], found["remedy"]) == said


@pytest.mark.gpu
def test_host_memory_can_be_pinned() -> None:
    found = look()
    assert found["device"] == torch.cuda.get_device_name(0)
    assert found["pinned_bytes"] == PINNED_BYTES
