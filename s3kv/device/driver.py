"""`cuMemcpyBatchAsync`: many copies in one call of the CUDA driver, made by its copy engines.

Called through `ctypes` with the addresses of arrays, which lets go of the GIL and converts nothing;
NVIDIA's `cuda-bindings` finds the function but would take lists of Python integers. CUDA builds of
torch bring it along from 2.11 on.

The version asked for is that of CUDA 12.8, which introduced the call. Later drivers keep it beside
the one of 13.0, which has no `failIdx`, so one prototype serves them all.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from s3kv.device.gpu import Copies

_NAME = b"cuMemcpyBatchAsync"
_CUDA_VERSION = 12080
_NO_COPY = ctypes.c_size_t(-1).value

_MAX_COPIES = 4096
"""In one call. Calls with some 50,000 copies were reported to crash or hang drivers; a chunk of
long pieces has hundreds."""

STREAM_ORDER = 1
"""CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: the source is read when the stream has come to the copy."""
ANY_ORDER = 3
"""CU_MEMCPY_SRC_ACCESS_ORDER_ANY: it may be read from the call on, whatever the stream waits for;
the destination is still written in the order of the stream."""
PREFER_OVERLAP = 1
"""CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE: copy engines before multiprocessors. Only the bus is
between us and the bytes, and a copy engine fills it."""


class Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", ctypes.c_uint), ("id", ctypes.c_int))


class Attributes(ctypes.Structure):
    """CUmemcpyAttributes. The locations are hints for managed memory, which ours is not."""

    _fields_ = (
        ("srcAccessOrder", ctypes.c_uint),
        ("srcLocHint", Location),
        ("dstLocHint", Location),
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
    """The driver has no such call, or cannot be asked; says why."""


class BatchCall:
    """entry: the driver's function, or anything of type `PROTOTYPE`."""

    def __init__(self, entry: Callable[..., int]) -> None:
        self._entry = entry
        self._in_order = Attributes(srcAccessOrder=STREAM_ORDER, flags=PREFER_OVERLAP)
        self._any_order = Attributes(srcAccessOrder=ANY_ORDER, flags=PREFER_OVERLAP)
        self._first = ctypes.c_size_t(0)

    @classmethod
    def find(cls) -> BatchCall:
        """Ask the driver. Raises `NoBatchCall`."""
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise NoBatchCall(
                f"cuda-bindings is not installed, try pip install 's3kv[gpu]' ({error})"
            ) from None
        try:
            result, address, _ = driver.cuGetProcAddress(_NAME, _CUDA_VERSION, 0)
        except RuntimeError as error:  # no driver at all
            raise NoBatchCall(str(error)) from None
        if int(result) or not address:
            raise NoBatchCall(f"the driver is older than CUDA 12.8 (CUresult {int(result)})")
        return cls(PROTOTYPE(int(address)))

    def __call__(self, copies: Copies, source_is_stable: bool, stream: int) -> None:
        """Launch `copies` on a stream, given by its handle, which must not be 0: the call refuses
        the legacy default stream. The calling thread must have a current context.

        The arrays may be freed on return. Raises `RuntimeError` when the driver refuses; some of
        the copies may then be under way.
        """
        attributes = self._any_order if source_is_stable else self._in_order
        failed = ctypes.c_size_t(_NO_COPY)
        for begin in range(0, len(copies.sizes), _MAX_COPIES):
            some = Copies(*(array[begin : begin + _MAX_COPIES] for array in copies))
            result = self._entry(
                some.destinations.ctypes.data,
                some.sources.ctypes.data,
                some.sizes.ctypes.data,
                len(some.sizes),
                ctypes.addressof(attributes),
                ctypes.addressof(self._first),
                1,
                ctypes.addressof(failed),
                stream,
            )
            if result:
                raise RuntimeError(_refusal(result, failed.value, begin, copies))


def _refusal(result: int, failed: int, begin: int, copies: Copies) -> str:
    text = f"cuMemcpyBatchAsync failed with CUresult {result}"
    if failed >= len(copies.sizes) - begin:
        return text
    destination, source, nbytes = (int(array[begin + failed]) for array in copies)
    return f"{text} at {nbytes} bytes from {source:#x} to {destination:#x}"
