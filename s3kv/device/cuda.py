"""The GPU itself, by torch's streams and events and NVIDIA's driver. See `gpu.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from s3kv.device.driver import BatchCall, NoBatchCall
from s3kv.device.gpu import Copies
from s3kv.device.pinning import pin, unpin
from s3kv.device.stacks import Stack, with_rows


class CudaStream:
    """One of torch's, for the events of `CudaGpu`. `batch` is None where the driver has no such
    call.
    """

    __slots__ = ("_batch", "_stream")

    def __init__(self, stream: torch.cuda.Stream, batch: BatchCall | None) -> None:
        self._stream = stream
        self._batch = batch

    def wait(self, event: Any) -> None:
        self._stream.wait_event(event)

    def record(self, event: Any) -> None:
        event.record(self._stream)

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            destination.copy_(source, non_blocking=True)

    def copy_batch(self, copies: Copies, source_is_stable: bool) -> None:
        assert self._batch is not None, "asked for what `no_batch` rules out"
        self._batch(copies, source_is_stable, self._stream.cuda_stream)

    def upload(self, destination: torch.Tensor, numbers: NDArray[np.int64]) -> None:
        # Torch's allocator of pinned memory keeps what is freed until the stream has passed.
        self.copy(destination, torch.from_numpy(numbers).pin_memory())

    def gather(self, stacks: Sequence[Stack], rows: torch.Tensor) -> None:
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            for stack, numbers in with_rows(stacks, rows):
                stack.gather(numbers)

    def scatter(
        self, stacks: Sequence[Stack], rows: torch.Tensor, first_block: int, blocks: int
    ) -> None:
        # vLLM allocates its caches in inference mode, and only there may they be written to.
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            for stack, numbers in with_rows(stacks, rows):
                stack.scatter(numbers, first_block, blocks)

    def synchronize(self) -> None:
        self._stream.synchronize()


class CudaGpu:
    """`device`, for threads on which it is the current one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._registered: dict[int, int] = {}
        self._batch: BatchCall | None = None
        self.no_batch = ""
        try:
            self._batch = BatchCall.find()
        except NoBatchCall as error:
            self.no_batch = str(error)

    def current_stream(self) -> CudaStream:
        return CudaStream(torch.cuda.current_stream(self._device), self._batch)

    def new_stream(self, *, urgent: bool) -> CudaStream:
        # Zero is the lowest priority there is, and the engine's own.
        priority = -1 if urgent else 0
        stream: torch.cuda.Stream = torch.cuda.Stream(  # type: ignore[no-untyped-call]
            self._device, priority=priority
        )
        return CudaStream(stream, self._batch)

    def new_event(self) -> torch.cuda.Event:
        event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        return event

    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def enter_thread(self) -> None:
        torch.cuda.set_device(self._device)
        # A thread that asks for device 0 has it already, says torch, and sets nothing; the driver's
        # own calls find no context on it until something of the runtime has run there.
        torch.zeros(1, device=self._device)

    def pin(self, memory: torch.Tensor, unit_bytes: int) -> bool:
        self._registered = pin(memory, unit_bytes, self._device)
        return sum(self._registered.values()) == memory.numel()

    def unpin(self) -> None:
        unpin(self._registered)
