"""The engine's thread hands copies over and goes on: no call of its own waits for the GPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from s3kv.messages import CopyPart
from tests.gpu.engine import LONG_S
from tests.gpu.rig import Rig, rig
from tests.unit.device.caches import Shape
from tests.unit.device.devices import Device

SHAPE = Shape("LBNHC", layers=8, blocks=16, tokens=16, content=64)
SLOTS = 4
ENGINE = "the engine's own calls"
WAITS = ("Synchronize", "Malloc", "Free", "HostAlloc", "HostRegister")
"""Parts of the names of what waits for the device, or may: freeing and allocating do, too. A
`cudaMemcpy` that is not asynchronous as well."""


def copy_for_a_while(r: Rig) -> None:
    """What an engine calls, as often as pools and caches need to fill up, and then some more."""
    for job in range(40):
        r.copies.fence([job - 2])
        r.copies.save(job, 0, job % 2, [0, 1])
        r.copies.load(str(job), [CopyPart(0, 2 + job % 2, 0, (2, 3))])
        r.copies.poll()
    r.copies.fence(range(40))


def waiting(name: str) -> bool:
    is_copy = "Memcpy" in name or "Memset" in name
    return any(part in name for part in WAITS) or (is_copy and "Async" not in name)


def calls_of_engine(trace: dict[str, Any]) -> list[str]:
    """The CUDA calls that the thread made which was in `ENGINE`, while it was."""
    events = trace["traceEvents"]
    (work,) = (e for e in events if e.get("cat") == "user_annotation" and e["name"] == ENGINE)
    begin, end = work["ts"], work["ts"] + work["dur"]
    return [
        call["name"]
        for call in events
        if call.get("cat") in ("cuda_runtime", "cuda_driver")
        and (call["pid"], call["tid"]) == (work["pid"], work["tid"])
        and begin <= call["ts"] <= end
    ]


@pytest.mark.gpu
def test_no_cuda_call_of_the_engine_s_thread_waits(tmp_path: Path) -> None:
    with rig(Device("cuda"), SHAPE, SLOTS) as r:
        copy_for_a_while(r)
        r.finish()
        calls = calls_of_engine(profiled(lambda: copy_for_a_while(r), tmp_path))
        r.finish()
    print(sorted(set(calls)))
    assert calls, "nothing was recorded of this thread"
    assert [name for name in calls if waiting(name)] == []


@pytest.mark.gpu
def test_a_call_that_waits_is_seen(tmp_path: Path) -> None:
    numbers = torch.ones(8, device="cuda")
    calls = calls_of_engine(profiled(lambda: numbers.sum().item(), tmp_path))
    assert any(waiting(name) for name in calls)


def profiled(work: Callable[[], object], folder: Path) -> dict[str, Any]:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    profile = torch.profiler.profile(activities=activities)
    with profile, torch.profiler.record_function(ENGINE):
        work()
    profile.export_chrome_trace(str(folder / "trace.json"))
    trace: dict[str, Any] = json.loads((folder / "trace.json").read_text())
    return trace


@contextmanager
def waits_refused() -> Iterator[None]:
    """torch refuses, in every thread, what it knows to wait: blocking copies, `item`, `nonzero`.
    Not the explicit `synchronize` of streams and events, which the profile has to show."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_torch_sees_no_blocking_copy_in_any_thread() -> None:
    with rig(Device("cuda"), SHAPE, SLOTS) as r:
        with waits_refused():
            copy_for_a_while(r)
            assert r.copies.wait_all(LONG_S)
        r.finish()
        with waits_refused(), pytest.raises(RuntimeError, match="synchronizing"):
            r.caches.buffers[0][0].item()
