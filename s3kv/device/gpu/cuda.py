"""`CudaGpu`: the `Gpu` of real hardware: torch's streams and events, and one call of the driver.

`cuMemcpyBatchAsync` makes many copies in one call, by the copy engines. We call it through `ctypes`
with the addresses of arrays, which releases the GIL and converts nothing. NVIDIA's `cuda-bindings`,
part of CUDA builds of torch from 2.11 on, finds it, but would take lists of Python integers.

We ask for the version of CUDA 12.8, which introduced the call. Later drivers keep it beside that of
13.0, which has no `failIdx`, so one prototype serves them all.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from s3kv.device.copier import BatchRefused
from s3kv.device.gpu.gather import Stack, with_rows
from s3kv.device.gpu.interface import Copies
from s3kv.device.gpu.pinning import pin, unpin

_NAME = b"cuMemcpyBatchAsync"
_CUDA_VERSION = 12080
_NO_COPY = ctypes.c_size_t(-1).value
_ITEM_BYTES = np.dtype(np.int64).itemsize

MOST_COPIES = 4096
"""Most copies in one call. Calls with some 50,000 were reported to crash or hang drivers."""

STREAM_ORDER = 1
"""CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: the source is read once the stream reaches the copy."""
ANY_ORDER = 3
"""CU_MEMCPY_SRC_ACCESS_ORDER_ANY: the source may be read from the call on, whatever the stream
waits for; the destination is still written in the order of the stream."""
PREFER_OVERLAP = 1
"""CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE: use copy engines rather than multiprocessors. The bus
is the only bottleneck, and a copy engine fills it."""


class MemoryLocation(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", ctypes.c_uint), ("id", ctypes.c_int))


class Attributes(ctypes.Structure):
    """CUmemcpyAttributes. The locations are hints for managed memory, which ours is not."""

    _fields_ = (
        ("srcAccessOrder", ctypes.c_uint),
        ("srcLocHint", MemoryLocation),
        ("dstLocHint", MemoryLocation),
        ("flags", ctypes.c_uint),
    )


PROTOTYPE = ctypes.CFUNCTYPE(
    ctypes.c_uint,  # CUresult
    ctypes.c_void_p,  # CUdeviceptr *dsts
    ctypes.c_void_p,  # CUdeviceptr *srcs
    ctypes.c_void_p,  # size_t *sizes
    ctypes.c_size_t,  # size_t count
    ctypes.c_void_p,  # CUmemcpyAttributes *attrs
    ctypes.c_void_p,  # size_t *attrsIdxs, of the first copy that has each of the attributes
    ctypes.c_size_t,  # size_t numAttrs
    ctypes.c_void_p,  # size_t *failIdx
    ctypes.c_void_p,  # CUstream hStream
)


class NoBatchCall(Exception):
    """The driver has no such call, or cannot be asked. The message says why."""


class BatchCall:
    """The call itself, for one thread at a time. entry: the function, of type `PROTOTYPE`."""

    def __init__(self, entry: Callable[..., int]) -> None:
        self._entry = entry
        self._attributes = [
            Attributes(srcAccessOrder=order, flags=PREFER_OVERLAP)
            for order in (STREAM_ORDER, ANY_ORDER)
        ]
        self._first = ctypes.c_size_t(0)
        self._failed = ctypes.c_size_t(_NO_COPY)
        # The last arguments but the stream, which are the same for every call.
        first, failed = ctypes.addressof(self._first), ctypes.addressof(self._failed)
        self._in_order, self._any_order = (
            (ctypes.addressof(one), first, 1, failed) for one in self._attributes
        )

    @classmethod
    def find(cls) -> BatchCall:
        """Look the function up in the driver. Raises `NoBatchCall`."""
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise NoBatchCall(
                f"cuda-bindings is not installed, try pip install 'vllm-s3kv[gpu]' ({error})"
            ) from None
        try:
            result, address, _ = driver.cuGetProcAddress(_NAME, _CUDA_VERSION, 0)
        except RuntimeError as error:  # no driver at all
            raise NoBatchCall(str(error)) from None
        if int(result) or not address:
            raise NoBatchCall(f"the driver is older than CUDA 12.8 (CUresult {int(result)})")
        return cls(PROTOTYPE(int(address)))

    def __call__(self, copies: Copies, source_is_stable: bool, stream: int) -> None:
        """Launch `copies` on a stream, given by its handle. The handle must not be 0: the driver
        refuses the legacy default stream. The calling thread must have a current context.

        The arrays are contiguous, and may be freed on return. Raises `BatchRefused`.
        """
        order = self._any_order if source_is_stable else self._in_order
        addresses = [array.__array_interface__["data"][0] for array in copies]
        count = len(copies.sizes)
        for begin in range(0, count, MOST_COPIES):
            self._failed.value = _NO_COPY
            arrays = [address + begin * _ITEM_BYTES for address in addresses]
            result = self._entry(*arrays, min(MOST_COPIES, count - begin), *order, stream)
            if result:
                raise BatchRefused(_refusal(result, self._failed.value, begin, copies))


def _refusal(result: int, failed: int, begin: int, copies: Copies) -> str:
    text = f"cuMemcpyBatchAsync failed with CUresult {result}"
    if failed >= len(copies.sizes) - begin:
        return text
    destination, source, nbytes = (int(array[begin + failed]) for array in copies)
    return f"{text} at {nbytes} bytes from {source:#x} to {destination:#x}"


class CudaStream:
    """A stream of torch's. batch: None where the driver has no such call."""

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
        self._batch: BatchCall | None = None
        self.no_batch = ""
        try:
            self._batch = BatchCall.find()
        except NoBatchCall as error:
            self.no_batch = str(error)

    def current_stream(self) -> CudaStream:
        return CudaStream(torch.cuda.current_stream(self._device), self._batch)

    def new_stream(self, *, urgent: bool) -> CudaStream:
        # Zero is the lowest priority, and the one the engine uses.
        priority = -1 if urgent else 0
        stream: torch.cuda.Stream = torch.cuda.Stream(self._device, priority=priority)
        return CudaStream(stream, self._batch)

    def new_event(self, *, timed: bool = False) -> torch.cuda.Event:
        event: torch.cuda.Event = torch.cuda.Event(enable_timing=timed)
        return event

    def host_numbers(self, count: int) -> tuple[NDArray[np.int64], torch.Tensor]:
        numbers = torch.zeros(count, dtype=torch.int64).pin_memory()
        # An address of pinned memory is one of the GPU, too. The tensor keeps `numbers` alive.
        array = {"shape": (count,), "typestr": "<i8", "data": (numbers.data_ptr(), False)}
        mapped = SimpleNamespace(__cuda_array_interface__=array | {"version": 3}, keeps=numbers)
        return numbers.numpy(), torch.as_tensor(mapped, device=self._device)

    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def enter_thread(self) -> None:
        torch.cuda.set_device(self._device)
        # Torch takes device 0 for every thread's current one and sets nothing; the driver's own
        # calls find no context on the thread until a call of the runtime has run there.
        torch.zeros(1, device=self._device)

    def pin(self, memory: torch.Tensor, unit_bytes: int) -> bool:
        self._registered = pin(memory, unit_bytes, self._device)
        return sum(self._registered.values()) == memory.numel()

    def unpin(self) -> None:
        unpin(self._registered)
