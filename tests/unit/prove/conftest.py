"""An engine for the arms that needs no vLLM."""

from __future__ import annotations

import pytest

from s3kv.prove.arm_process import ArmProcess


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ArmProcess, "module", "tests.unit.prove.stub")
