"""Copies of encoder outputs between the device and a slab: whole tensors, one at a time.

A save reads the tensor after the engine's earlier work; the engine's later work sees a load's
result. On a GPU both run on side streams, and neither call blocks.
"""

from __future__ import annotations

import ctypes
import time
from typing import Any, NamedTuple

import torch

from s3kv.device.gpu.pinning import pin, unpin

_UNIT_BYTES = 2**30
"""No item crosses a multiple of this, because extents are aligned and shorter."""


class HostItems:
    """Copies for an engine whose tensors are in host memory. They have ended when they return, and
    are not torch's, which wake threads that wait for each other on busy cores. dtype: of all items.
    For the engine's thread only."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def attach(self, slab: memoryview) -> None:
        """Prepare a slab for copies."""

    def save(self, tensor: torch.Tensor, payload: memoryview) -> torch.cpu.Event:
        """Copy the tensor to `payload`, which has the same length. Returns the copy's end, which
        `synchronize` waits for."""
        source = tensor.detach().contiguous()
        ctypes.memmove(_address(payload), source.data_ptr(), len(payload))
        return torch.cpu.Event()

    def load(self, payload: memoryview, rows: int, width: int) -> torch.Tensor:
        tensor = torch.empty((rows, width), dtype=self._dtype, device="cpu")
        ctypes.memmove(tensor.data_ptr(), _address(payload), len(payload))
        return tensor

    def now(self) -> float:
        """A moment in the engine's work, for `seconds_between`."""
        return time.monotonic()

    def seconds_between(self, started: float, stopped: float) -> float | None:
        """Seconds between two moments of `now`; None while the device has not reached `stopped`."""
        return stopped - started

    def close(self) -> None:
        """Release the slabs. No copy is running afterwards."""


class _SaveEnd(NamedTuple):
    """The end of a save on a GPU. Any thread may wait for it."""

    event: torch.cuda.Event
    device: torch.device

    def synchronize(self) -> None:
        # A thread without a selected GPU would create a context on the first one, in its memory.
        with torch.cuda.device(self.device):
            self.event.synchronize()


class CudaItems:
    """Copies for an engine on a GPU, over two side streams. Contract: see `HostItems`."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        self._out: Any = torch.cuda.Stream(device)
        self._in: Any = torch.cuda.Stream(device)
        self._registered: list[dict[int, int]] = []
        self._slabs: list[torch.Tensor] = []

    def attach(self, slab: memoryview) -> None:
        """Pin the slab: a copy from unpinned memory blocks the engine's thread to its end."""
        memory = torch.frombuffer(slab, dtype=torch.uint8)
        with torch.cuda.device(self._device):
            self._registered.append(pin(memory, _UNIT_BYTES, self._device))
        self._slabs.append(memory)

    def save(self, tensor: torch.Tensor, payload: memoryview) -> _SaveEnd:
        with torch.inference_mode():
            source = tensor.detach().contiguous().view(-1).view(torch.uint8)
            self._out.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._out):
                torch.frombuffer(payload, dtype=torch.uint8).copy_(source, non_blocking=True)
                # The engine may drop the tensor before the copy has read it.
                source.record_stream(self._out)
                return _SaveEnd(self._out.record_event(), self._device)

    def load(self, payload: memoryview, rows: int, width: int) -> torch.Tensor:
        current = torch.cuda.current_stream(self._device)
        with torch.inference_mode(), torch.cuda.stream(self._in):
            tensor = torch.empty((rows, width), dtype=self._dtype, device=self._device)
            source = torch.frombuffer(payload, dtype=torch.uint8)
            tensor.view(-1).view(torch.uint8).copy_(source, non_blocking=True)
        current.wait_stream(self._in)
        tensor.record_stream(current)
        return tensor

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds_between(self, started: torch.cuda.Event, stopped: torch.cuda.Event) -> float | None:
        return float(started.elapsed_time(stopped)) / 1000 if stopped.query() else None

    def close(self) -> None:
        torch.cuda.synchronize(self._device)
        for registered in self._registered:
            unpin(registered)
        self._slabs.clear()


ItemCopies = HostItems | CudaItems


def item_copies(dtype: torch.dtype, device: torch.device) -> ItemCopies:
    return CudaItems(dtype, device) if device.type == "cuda" else HostItems(dtype)


def _address(payload: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(payload))
