"""Copies on the CPU: a load is shared between two threads, and is what one of them would copy."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings

from s3kv.device import cpu
from tests.unit.device.caches import ORDERS, Shape
from tests.unit.device.devices import Device
from tests.unit.device.test_bytes import cases, save_and_load


@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("order", ORDERS)
def test_two_threads_load_as_one(monkeypatch: pytest.MonkeyPatch, order: str, ratio: int) -> None:
    monkeypatch.setattr(cpu, "_SHARED_BYTES", 2)
    monkeypatch.setattr(cpu.os, "sched_getaffinity", lambda pid: {0, 1})
    halved = []
    split = cpu._split
    monkeypatch.setattr(cpu, "_split", lambda *moves: halved.append(1) or split(*moves))

    @settings(max_examples=40, suppress_health_check=list(HealthCheck))
    @given(case=cases(order, ratio))
    def check(case: tuple[Shape, list[int], list[int], int, int]) -> None:
        save_and_load(Device("cpu"), *case)

    check()
    assert halved
