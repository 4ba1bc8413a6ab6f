"""How a test acts as an engine that computes on several streams, and gets in the way of copies."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from s3kv.device.gpu.gather import Stack
from s3kv.device.gpu.gpu_copier import GpuCopier
from s3kv.device.gpu.interface import Gpu
from s3kv.device.slot_payloads import ChunkPlaces
from tests.unit.device.devices import A_WHILE_CYCLES, Device, SimulatedDevice
from tests.unit.device.simulated import SimulatedGpu, SimulatedStream

LONG_S = 20.0


class Engine:
    """Streams and captured graphs of an engine on `device`, which must have been opened."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def new_stream(self) -> Any:
        """Its work begins after what was launched so far, on the stream that is current."""
        if isinstance(self._device, SimulatedDevice):
            stream = self._device.gpu.engine_stream()
            mark = self._device.gpu.new_event()
            self._device.gpu.current.record(mark)
            stream.wait(mark)
            return stream
        if self._device.kind != "cuda":
            return None
        other = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        other.wait_stream(torch.cuda.current_stream())
        return other

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """The stream is current in the block."""
        if isinstance(self._device, SimulatedDevice):
            gpu, before = self._device.gpu, self._device.gpu.current
            gpu.current = stream
            try:
                yield
            finally:
                gpu.current = before
        elif stream is None:
            yield
        else:
            with torch.cuda.stream(stream):
                yield

    def captured(self, work: Callable[[], object]) -> Callable[[], object]:
        """What launches `work` again: a CUDA graph of it, where there is CUDA. `work` runs once."""
        if self._device.kind != "cuda":
            self._device.launch(work)
            return lambda: self._device.launch(work)
        work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return graph.replay


class SlowGpu:
    """A GPU on which the copier comes to the pages late: long after the engine, if nothing holds
    that back. On a simulated one not before `go_on`."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self.dawdling = threading.Event()
        """A copy has come to the pages."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._gpu, name)

    def new_stream(self, *, urgent: bool) -> SlowStream:
        return SlowStream(self._gpu.new_stream(urgent=urgent), self.dawdling)

    def go_on(self) -> None:
        assert self.dawdling.wait(LONG_S)
        if isinstance(self._gpu, SimulatedGpu):
            for stream in self._gpu.streams:
                stream.go_on()


class SlowStream:
    def __init__(self, stream: Any, dawdling: threading.Event) -> None:
        self._stream = stream
        self._dawdling = dawdling

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def gather(self, stacks: Sequence[Stack], rows: torch.Tensor) -> None:
        if isinstance(self._stream, SimulatedStream):
            self._stream.stall()
        else:
            with torch.cuda.stream(self._stream._stream):
                torch.cuda._sleep(A_WHILE_CYCLES)  # type: ignore[no-untyped-call]
        self._dawdling.set()
        self._stream.gather(stacks, rows)


def slow_copier(device: Device, places: ChunkPlaces) -> GpuCopier:
    """Of a `SlowGpu`."""
    if isinstance(device, SimulatedDevice):
        gpu = device.gpu = SimulatedGpu(device.seed)
    else:
        from s3kv.device.gpu.cuda import CudaGpu

        gpu = CudaGpu(places.device)
    return GpuCopier(places, SlowGpu(gpu))  # type: ignore[arg-type]


def synchronize_engine(device: Device) -> None:
    """Wait for what the engine has launched, and not for copies."""
    if isinstance(device, SimulatedDevice):
        device.gpu.current.synchronize()
    else:
        torch.cuda.current_stream().synchronize()
