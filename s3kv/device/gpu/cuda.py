"""`CudaGpu`: the `Gpu` of real hardware: torch's streams and events."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from s3kv.device.gpu.gather import Stack, with_rows
from s3kv.device.gpu.pinning import pin, unpin


class CudaStream:
    """A stream of torch's."""

    __slots__ = ("_stream",)

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def wait(self, event: Any) -> None:
        self._stream.wait_event(event)

    def record(self, event: Any) -> None:
        event.record(self._stream)

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            destination.copy_(source, non_blocking=True)

    def fetch(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            torch.add(source, 0, out=destination)  # `copy_` would take a copy engine

    def gather(self, stacks: Sequence[Stack], rows: torch.Tensor) -> None:
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            for stack, numbers in with_rows(stacks, rows):
                stack.gather(numbers)

    def scatter(self, stacks: Sequence[Stack], rows: torch.Tensor, first_block: int) -> None:
        # vLLM allocates its caches in inference mode; they may only be written to in that mode.
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            for stack, numbers in with_rows(stacks, rows):
                stack.scatter(numbers, first_block)

    def synchronize(self) -> None:
        self._stream.synchronize()


class CudaGpu:
    """The GPU `device`, for threads on which it is the current device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._registered: dict[int, int] = {}

    def current_stream(self) -> CudaStream:
        return CudaStream(torch.cuda.current_stream(self._device))

    def new_stream(self, *, urgent: bool) -> CudaStream:
        # Zero is the lowest priority, and the one the engine uses.
        return CudaStream(torch.cuda.Stream(self._device, priority=-1 if urgent else 0))

    def new_event(self, *, timed: bool = False) -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=timed)

    def host_numbers(self, count: int) -> tuple[NDArray[np.int64], torch.Tensor]:
        numbers = torch.zeros(count, dtype=torch.int64).pin_memory()
        # An address of pinned memory is also valid on the GPU. The tensor keeps `numbers` alive.
        array = {"shape": (count,), "typestr": "<i8", "data": (numbers.data_ptr(), False)}
        mapped = SimpleNamespace(__cuda_array_interface__=array | {"version": 3}, keeps=numbers)
        return numbers.numpy(), torch.as_tensor(mapped, device=self._device)

    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def enter_thread(self) -> None:
        torch.cuda.set_device(self._device)
        torch.zeros(1, device=self._device)  # a device that fails does so here, at the start

    def pin(self, memory: torch.Tensor, unit_bytes: int) -> bool:
        self._registered = pin(memory, unit_bytes, self._device)
        return sum(self._registered.values()) == memory.numel()

    def unpin(self) -> None:
        unpin(self._registered)
