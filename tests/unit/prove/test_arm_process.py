"""The process of an arm, from the driver's side."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from s3kv.prove.arm_process import ArmProcess


@pytest.mark.usefixtures("stub")
def test_no_process_outlives_its_arm(tmp_path: Path) -> None:
    settings = {"argv": [], "kv_transfer_config": None, "answer_tokens": 1}
    child = ArmProcess(settings, tmp_path / "log").__enter__()
    found = [psutil.Process(pid) for pid in child._processes()]
    assert len(found) == 2
    assert child.cpu_s() > 0
    child.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    _, left = psutil.wait_procs(found, timeout=60)
    assert all(one.status() == psutil.STATUS_ZOMBIE for one in left)
