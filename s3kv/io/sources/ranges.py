"""Ranged reads: large objects by several GETs at once, each of a range, into one place.

One connection to S3 carries about 90 MB/s, however fast the network is. All ranges are requested at
once, because waiting for the first answer would take a second first byte. No ETag is known then, so
`If-Match` cannot keep out an object that is replaced in between. Instead the ETags of the answers
are compared. Ranges whose ETags differ are never used together: the object is then read whole, like
a small one. The digests would find a mixture, too, but there are none in the mode "none".

Each range is a request of its own to everything below: to retries, hedging and the window.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable, Sequence
from itertools import pairwise
from typing import Any, Protocol, TypeVar

from s3kv.errors import StoreUnranged
from s3kv.io.sources.transfer_job import Borrow, TransferJob
from s3kv.objects.codec import ChunkFormat, Gathering
from s3kv.objects.headers import Mismatch
from s3kv.stores.store import ObjectInfo

_log = logging.getLogger("s3kv.io")

_T = TypeVar("_T")

RANGE_BYTES = 4 * 2**20
"""Length of the shortest range."""

Reading = tuple[ObjectInfo | None, Mismatch | None]
"""Metadata of an object (None: no such object), and why it does not verify (None: it does)."""


class Requests(Protocol):
    """Requests for the object of a job, with all their attempts."""

    async def whole(self, job: TransferJob) -> Reading:
        """Read the object by one GET."""
        ...

    async def part(self, job: TransferJob, bounds: range) -> ObjectInfo | None:
        """Read a range of the object into its place, as `ObjectStore.get_range` does."""
        ...


class RangedReads:
    """Reads objects in ranges where that pays. Belongs to one asyncio loop.

    range_bytes: shortest range; 0 for none.
    """

    def __init__(self, range_bytes: int, borrow: Borrow, requests: Requests) -> None:
        self._range_bytes = range_bytes
        self._borrow = borrow
        self._requests = requests

    async def read(self, job: TransferJob) -> Reading:
        """Read and verify an object. It is read whole if it is small, if its length is not known,
        if no place is free, or if ranges do not give one object.

        No request is under way when this ends, however it ends."""
        if not isinstance(job.format, ChunkFormat) or not self._range_bytes:
            return await self._requests.whole(job)
        try:
            reading = await self._in_ranges(job, job.format)
        except StoreUnranged as error:
            reading = await self._requests.whole(job)
            if reading[0] is not None and reading[1] is None:  # then it is not the object's fault
                self._range_bytes = 0
                _log.warning("%s. Objects are read by one GET each now", error)
        return await self._requests.whole(job) if reading is None else reading

    async def _in_ranges(self, job: TransferJob, chunk: ChunkFormat) -> Reading | None:
        """Read the object in one range more than there are borrowed places. None if there are none,
        or the ranges are not of one object."""
        with self._borrow(job.nbytes // self._range_bytes - 1) as (count, give_back):
            if not count:
                return None
            gathering = Gathering(chunk, job.place, job.block_hash)

            async def read(bounds: range) -> ObjectInfo | None:
                info = await self._requests.part(job, bounds)
                give_back()
                if info is not None and info.nbytes == job.nbytes:
                    gathering.arrived(bounds.start, bounds.stop)
                return info

            infos = await all_of(read(bounds) for bounds in cut(job.nbytes, 1 + count))
        if infos is None:
            return None, None
        if len({info.etag for info in infos}) > 1 or not infos[0].etag:
            return None
        return infos[0], gathering.check(infos[0].nbytes)


def cut(nbytes: int, count: int) -> list[range]:
    """The bytes of an object in `count` ranges of about the same length, in order. Pure."""
    ends = [nbytes * number // count for number in range(count + 1)]
    return [range(*bounds) for bounds in pairwise(ends)]


async def all_of(reads: Iterable[Coroutine[Any, Any, _T | None]]) -> list[_T] | None:
    """The results of reads that run at once, in order; None if one has found nothing. Raises the
    first error. All have ended when this returns, raises or is cancelled."""
    loop = asyncio.get_running_loop()
    tasks = [loop.create_task(read) for read in reads]
    running = set(tasks)
    try:
        while running:
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            if any(task.result() is None for task in done):
                return None
    finally:
        for task in running:
            task.cancel()
        await _ended(tasks)
    return [found for task in tasks if (found := task.result()) is not None]


async def _ended(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Wait for tasks that have been cancelled, if they have not ended. A cancellation meanwhile is
    raised afterwards: a second one would break off their cleaning up."""
    interrupted = False
    while running := {task for task in tasks if not task.done()}:
        try:
            await asyncio.wait(running)
        except asyncio.CancelledError:
            interrupted = True
    for task in tasks:
        if not task.cancelled():
            task.exception()  # looked at, so that asyncio does not report it
    if interrupted:
        raise asyncio.CancelledError
