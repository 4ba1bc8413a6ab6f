"""`Gpu`: the interface between the copier and a GPU. Streams, events, and copies in stream order.

`cuda.py` is the real one. The tests have another, which runs work as early, as late and as torn as
this contract allows; the copier's logic relies on the contract alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from s3kv.device.gpu.gather import Stack


class Event(Protocol):
    """A point in a stream. Recording it again moves it; a stream that waits already still waits for
    the earlier point. An event that was never recorded has passed."""

    def query(self) -> bool:
        """Whether the point has passed. Does not block. `RuntimeError`: the device has failed."""

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds of the device from this point to `end`. Both have passed, and are timed."""


class Stream(Protocol):
    """A queue of GPU work that runs in order; only `wait` orders it against other streams.

    Only `synchronize` blocks the host, unless host memory is not pinned. Every method may raise
    `RuntimeError`.
    """

    def wait(self, event: Event) -> None:
        """Make work launched from now on run after the present point of `event`."""

    def record(self, event: Event) -> None:
        """Move `event` behind everything launched so far."""

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Copy flat bytes between device and host; both tensors have the same length."""

    def fetch(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Copy `Gpu.host_numbers` by a kernel: copies of other streams may hold a copy engine."""

    def gather(self, stacks: Sequence[Stack], rows: torch.Tensor) -> None:
        """Run `Stack.gather` for each, for a whole chunk. rows: `row_numbers`, on the device."""

    def scatter(self, stacks: Sequence[Stack], rows: torch.Tensor, first_block: int) -> None:
        """Run `Stack.scatter` for each. rows: as for `gather`, those of one block or more."""

    def synchronize(self) -> None:
        """Block the host until everything launched here has run."""


class Gpu(Protocol):
    def current_stream(self) -> Stream:
        """The stream that the calling thread launches to now."""

    def new_stream(self, *, urgent: bool) -> Stream:
        """A new stream. An urgent one goes before the engine's, any other has lowest priority."""

    def new_event(self, *, timed: bool = False) -> Event: ...

    def host_numbers(self, count: int) -> tuple[NDArray[np.int64], torch.Tensor]:
        """Pinned int64 in host memory, as the host sees them, and as kernels read them in place.
        Raises `RuntimeError` when they cannot be pinned."""

    def empty(self, nbytes: int) -> torch.Tensor:
        """Device memory, flat uint8, for use after everything launched on the current stream.
        Raises `RuntimeError` if there is not enough."""

    def enter_thread(self) -> None:
        """Prepare the calling thread to launch work."""

    def pin(self, memory: torch.Tensor, unit_bytes: int) -> bool:
        """Pin host memory for asynchronous copies that cross no multiple of `unit_bytes`. Returns
        False, after a warning, when part stays unpinned: its copies are slow, but right."""

    def unpin(self) -> None:
        """Undo `pin`. No copy may be running. Idempotent."""
