"""What is said of the GPU is what a worker would find."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from s3kv.device.probe import PINNED_BYTES, look


def test_it_prints_what_it_finds() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "s3kv.device.probe"], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout)["torch"] == torch.__version__


@pytest.mark.gpu
def test_host_memory_can_be_pinned() -> None:
    found = look()
    assert found["device"] == torch.cuda.get_device_name(0)
    assert found["pinned_bytes"] == PINNED_BYTES
