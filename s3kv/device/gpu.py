"""What the copier asks of a GPU: streams, events, and copies that run in the order of a stream.

`cuda.py` is the real one. The tests have another, which runs what was launched as early, as late
and as torn as this contract allows; the copier's logic is written against the contract alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from s3kv.device.stacks import Stack


class Event(Protocol):
    """A point in a stream. Recording it again moves it; whoever waits already goes on waiting for
    where it was. An event that was never recorded has passed.
    """

    def query(self) -> bool:
        """Whether the point has passed. Does not block. Raises `RuntimeError` when the device has
        failed.
        """


class Copies(NamedTuple):
    """Contiguous copies, in no order among themselves; arrays of int64, of the same length.

    None is empty, and no destination overlaps another or a source.
    """

    destinations: NDArray[np.int64]
    sources: NDArray[np.int64]
    sizes: NDArray[np.int64]


class Stream(Protocol):
    """What is launched here runs in order, and in no order with other streams but by `wait`.

    Nothing but `synchronize` waits on the host, unless the host's memory is not pinned. All may
    raise `RuntimeError`.
    """

    def wait(self, event: Event) -> None:
        """What is launched after this runs after the point where `event` is now."""

    def record(self, event: Event) -> None:
        """Move `event` to behind everything launched so far."""

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Between device and host: flat bytes, as many on both sides."""

    def upload(self, destination: torch.Tensor, numbers: NDArray[np.int64]) -> None:
        """Copy numbers to as many int64 on the device. They may be forgotten on return."""

    def copy_batch(self, copies: Copies, source_is_stable: bool) -> None:
        """Copies between device and host by address; only where `Gpu.no_batch` is empty.

        source_is_stable: nothing writes to the sources from this call until the copies are over,
        so they may be read ahead of what the stream waits for.
        """

    def gather(self, stacks: Sequence[Stack], rows: torch.Tensor) -> None:
        """`Stack.gather` for each, of a whole chunk. rows: what `row_numbers` are on the device."""

    def scatter(
        self, stacks: Sequence[Stack], rows: torch.Tensor, first_block: int, blocks: int
    ) -> None:
        """`Stack.scatter` for each. rows: as for `gather`, of so many blocks."""

    def synchronize(self) -> None:
        """Wait on the host until all that was launched here has run."""


class Gpu(Protocol):
    no_batch: str
    """Why there is no `copy_batch`; empty where there is."""

    def current_stream(self) -> Stream:
        """The one that the calling thread launches to now."""

    def new_stream(self, *, urgent: bool) -> Stream:
        """Urgent ones go before the engine's where both have work; others are of the lowest
        priority there is.
        """

    def new_event(self) -> Event: ...

    def empty(self, nbytes: int) -> torch.Tensor:
        """Device memory, flat uint8, for use after what the current stream was given so far."""

    def enter_thread(self) -> None:
        """Make the calling thread fit to launch."""

    def pin(self, memory: torch.Tensor, unit_bytes: int) -> bool:
        """Make host memory fit for asynchronous copies that cross no multiple of `unit_bytes`.
        False, after a warning, when part of it is not; copies of that part are slow, and right.
        """

    def unpin(self) -> None:
        """Undo `pin`; no copy may be running. Idempotent."""
