"""`TransferJob`: one object to move between memory and a source; and places for its requests."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from s3kv.errors import StoreDenied, StoreError, StoreRefused
from s3kv.messages import JobEnd, JobKind
from s3kv.objects.codec import ChunkFormat
from s3kv.objects.item_format import ItemFormat
from s3kv.place import Place
from s3kv.types import Outcome

Borrowed = tuple[int, Callable[[], None]]
"""Number of borrowed places, and a function that gives back one of them early, if one is left."""
Borrow = Callable[[int], AbstractContextManager[Borrowed]]
"""Borrows up to that many places for requests beside the job's own, during a block."""


@dataclass(frozen=True, slots=True, eq=False)
class TransferJob:
    """A job: one object to move. place: `format.object_bytes` of memory, header and payload."""

    job_id: int
    kind: JobKind
    key: str
    block_hash: bytes
    format: ChunkFormat | ItemFormat
    place: Place
    due_s: float = math.inf
    """Deadline for the start of further attempts, on the loop's clock."""
    near: bool = False
    """Whether a fetch asks only the sources of this host."""

    @property
    def nbytes(self) -> int:
        return self.format.object_bytes

    def end(self, outcome: Outcome, detail: str = "", *, nbytes: int = 0, **more: Any) -> JobEnd:
        """The record of its end, without the duration. more: further fields of it."""
        return JobEnd(self.job_id, self.kind, outcome, nbytes, detail=detail, **more)

    def failed(self, error: StoreError) -> JobEnd:
        """The record of its end by an error of a source."""
        if isinstance(error, StoreRefused):
            return self.end(Outcome.INVALID, str(error))
        denied = isinstance(error, StoreDenied)
        return self.end(Outcome.DENIED if denied else Outcome.FAILED, str(error))
