"""What is measured on, and its clocks: a GPU, or a CPU on which the programs are tried."""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import shutil
import statistics
import subprocess
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import Any

import torch


class Machine:
    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.is_gpu = self.device.type == "cuda"
        if self.is_gpu:
            self.device = torch.device("cuda", torch.cuda.current_device())
            torch.cuda.set_device(self.device)

    def synchronize(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize(self.device)

    def seconds(self, work: Callable[[], object]) -> float:
        """Of what `work` launches on the current stream, from event to event; the host's on a CPU.
        Waits for it."""
        self.synchronize()
        if not self.is_gpu:
            begin_s = perf_counter()
            work()
            return perf_counter() - begin_s
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def captured(self, work: Callable[[], object]) -> Callable[[], object]:
        """What launches the same again, as a graph. `work` runs a few times."""
        if not self.is_gpu:
            return work
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                work()
        torch.cuda.current_stream().wait_stream(side)
        self.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()

        def replay(kept: object = work) -> None:  # with the memory that the graph works on
            graph.replay()

        return replay

    def step_ended(self) -> Callable[[], object]:
        """What waits for all that was launched on the current stream so far."""
        if not self.is_gpu:
            return bool
        event = torch.cuda.Event()
        event.record()
        return event.synchronize

    def new_stream(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(torch.cuda.Stream()) if self.is_gpu else nullcontext()

    def describe(self) -> dict[str, Any]:
        """Names and versions of all that a figure depends on."""
        found: dict[str, Any] = {
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "kernel": platform.release(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "device": "cpu",
        }
        if not self.is_gpu:
            return found
        properties = torch.cuda.get_device_properties(self.device)
        found["device"] = properties.name
        found["device_bytes"] = properties.total_memory
        found["multiprocessors"] = properties.multi_processor_count
        found["cuda"] = torch.version.cuda
        for package in ("triton", "numpy"):
            try:
                found[package] = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                found[package] = None
        return found | _driver()


def _driver() -> dict[str, Any]:
    fields = (
        *("driver_version", "pcie.link.gen.max", "pcie.link.gen.current"),
        *("pcie.link.width.current", "clocks.sm", "clocks.mem"),
    )
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    command = [program, f"--query-gpu={','.join(fields)}", "--format=csv,noheader", "--id=0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        return {"nvidia-smi": done.stderr.strip() or done.stdout.strip()}
    values = [value.strip() for value in done.stdout.split(",")]
    return dict(zip(fields, values, strict=False))


def in_turn(
    names: Iterable[str], rounds: int, measure: Callable[[str], float]
) -> dict[str, list[float]]:
    """What is measured of each, in turns, of which the first is not counted: it warms up."""
    turns = [{name: measure(name) for name in names} for _ in range(rounds + 1)]
    return {name: [turn[name] for turn in turns[1:]] for name in names}


def spread(values: Sequence[float], digits: int = 2) -> dict[str, float]:
    """The median, and how far the others are from it."""
    ordered = sorted(values)
    return {
        "median": round(statistics.median(ordered), digits),
        "p90": round(ordered[math.ceil(0.9 * len(ordered)) - 1], digits),
        "least": round(ordered[0], digits),
        "most": round(ordered[-1], digits),
    }
