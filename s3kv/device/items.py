"""Encoder outputs between the device and a slab: whole tensors, one at a time.

A save reads the tensor after what the engine has launched so far, a load is complete for what the
engine launches from now on. On a GPU both go over streams of their own and nobody waits.
"""

from __future__ import annotations

import ctypes
import time
from typing import Any

import torch

from s3kv.device.pinning import pin, unpin

_UNIT_BYTES = 2**30
"""No item crosses a multiple of this: extents are aligned, and shorter."""


class _Done:
    """A copy that was over when it returned."""

    def wait(self) -> None:
        return


class _Event:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()


class HostItems:
    """Where the engine's tensors are in host memory: plain copies, over when they return.

    dtype: of all items. Engine's thread only.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def attach(self, slab: memoryview) -> None:
        """A slab that will be copied from or to."""

    def save(self, tensor: torch.Tensor, payload: memoryview) -> _Done:
        """Copy to `payload`, which is as long as the tensor."""
        source = tensor.detach().contiguous()
        _move(_address(payload), source.data_ptr(), len(payload))
        return _Done()

    def load(self, payload: memoryview, rows: int, width: int) -> torch.Tensor:
        tensor = torch.empty((rows, width), dtype=self._dtype, device="cpu")
        _move(tensor.data_ptr(), _address(payload), len(payload))
        return tensor

    def now(self) -> float:
        """A moment in the engine's work, for `seconds_between`."""
        return time.monotonic()

    def seconds_between(self, started: float, stopped: float) -> float | None:
        """None while the device has not come that far."""
        return stopped - started

    def close(self) -> None:
        """No copy is running any more."""


class CudaItems:
    """As `HostItems`, over two side streams."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        self._out: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._in: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._registered: list[dict[int, int]] = []
        self._slabs: list[torch.Tensor] = []

    def attach(self, slab: memoryview) -> None:
        """Pin it: a copy from unpinned memory holds the engine's thread until it is over."""
        memory = torch.frombuffer(slab, dtype=torch.uint8)
        with torch.cuda.device(self._device):
            self._registered.append(pin(memory, _UNIT_BYTES, self._device))
        self._slabs.append(memory)

    def save(self, tensor: torch.Tensor, payload: memoryview) -> _Event:
        with torch.inference_mode():
            source = tensor.detach().contiguous().view(-1).view(torch.uint8)
            self._out.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._out):
                torch.frombuffer(payload, dtype=torch.uint8).copy_(source, non_blocking=True)
                # The engine may drop the tensor before it has been read.
                source.record_stream(self._out)
                return _Event(self._out.record_event())

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
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds_between(self, started: torch.cuda.Event, stopped: torch.cuda.Event) -> float | None:
        if not stopped.query():  # type: ignore[no-untyped-call]
            return None
        return float(started.elapsed_time(stopped)) / 1000

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


def _move(to: int, source: int, nbytes: int) -> None:
    # memmove rather than torch's copy, which wakes threads that wait for each other on busy cores.
    ctypes.memmove(to, source, nbytes)
