"""Ranged reads: large objects by several GETs at once, each of a range, into one place.

One connection to S3 carries about 90 MB/s, however fast the network is. All ranges are requested at
once, because waiting for the first answer would take a second first byte. No ETag is known then, so
`If-Match` cannot keep out an object that is replaced in between. Instead the ETags of the answers
are compared. Ranges whose ETags differ are never used together: the object is then read whole, like
a small one. The digests would find a mixture, too, but there are none in the mode "none".

Each range is a request of its own to everything below: to retries, hedging and the window.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from itertools import pairwise

from s3kv.errors import StoreUnranged
from s3kv.io.sources.transfer_job import Borrow, TransferJob
from s3kv.objects.codec import ChunkFormat, Gathering
from s3kv.objects.headers import Mismatch
from s3kv.stores.lanes import all_of
from s3kv.stores.store import ObjectInfo

_log = logging.getLogger("s3kv.io")

RANGE_BYTES = 4 * 2**20
"""Length of the shortest range."""

Reading = tuple[ObjectInfo | None, Mismatch | None]
"""Metadata of an object (None: no such object), and why it does not verify (None: it does)."""


class RangedReads:
    """Reads objects in ranges where that pays. Belongs to one asyncio loop.

    range_bytes: shortest range; 0 for none. whole: reads and verifies the object of a job by one
    GET. part: reads a range of it into its place, as `ObjectStore.get_range` does. Both make all
    attempts.
    """

    def __init__(
        self,
        range_bytes: int,
        borrow: Borrow,
        whole: Callable[[TransferJob], Awaitable[Reading]],
        part: Callable[[TransferJob, range], Awaitable[ObjectInfo | None]],
    ) -> None:
        self._range_bytes = range_bytes
        self._borrow = borrow
        self._whole, self._part = whole, part

    async def read(self, job: TransferJob) -> Reading:
        """Read and verify an object. It is read whole if it is small, if its length is not known,
        if no place is free, or if ranges do not give one object.

        No request is under way when this ends, however it ends.
        """
        if not isinstance(job.format, ChunkFormat) or not self._range_bytes:
            return await self._whole(job)
        try:
            reading = await self._in_ranges(job, job.format)
        except StoreUnranged as error:
            reading = await self._whole(job)
            if reading[0] is not None and reading[1] is None:  # then it is not the object's fault
                self._range_bytes = 0
                _log.warning("%s. Objects are read by one GET each now", error)
        return await self._whole(job) if reading is None else reading

    async def _in_ranges(self, job: TransferJob, chunk: ChunkFormat) -> Reading | None:
        """Read the object in one range more than there are borrowed places. None if there are none,
        or the ranges are not of one object."""
        with self._borrow(job.nbytes // self._range_bytes - 1) as (count, give_back):
            if not count:
                return None
            gathering = Gathering(chunk, job.place, job.block_hash)

            async def read(bounds: range) -> ObjectInfo | None:
                info = await self._part(job, bounds)
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
