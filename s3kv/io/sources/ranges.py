"""Ranged reads: large objects by several GETs at once, each of a range, into one place.

One connection to S3 carries about 90 MB/s, however fast the network is. All ranges are requested at
once, because waiting for the first answer would cost a second first-byte time. No ETag is known at
that point, so `If-Match` cannot exclude an object that is replaced in between. Instead the ETags of
the answers are compared. Ranges whose ETags differ are never used together: the object is then read
whole, like a small one. The digests would also detect a mixture, but the mode "none" has none.

Each range is a separate request to everything below: retries, hedging and the window.

A compressed object is shorter than its format's length, and only its answers show by how much. The
ranges divide the length of the last such object, and the last range extends to the end.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable
from itertools import pairwise

from s3kv.errors import StoreUnranged
from s3kv.io.sources.reception import Reception
from s3kv.io.sources.transfer_job import Borrow, TransferJob
from s3kv.objects.codec import ChunkFormat
from s3kv.objects.encryption import SEGMENT_BYTES
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

    range_bytes: shortest range; 0 for none. receive: begins the reception of the object of a job.
    whole: reads and verifies the object of a job by one GET. part: reads a range of it into the
    memory that the reception gives, as `ObjectStore.get_into` does. Both make all attempts.
    """

    def __init__(
        self,
        range_bytes: int,
        borrow: Borrow,
        receive: Callable[[TransferJob], Reception],
        whole: Callable[[TransferJob], Awaitable[Reading]],
        part: Callable[[TransferJob, range, Reception], Awaitable[ObjectInfo | None]],
    ) -> None:
        self._range_bytes = range_bytes
        self._unit = math.gcd(range_bytes, SEGMENT_BYTES)
        self._borrow = borrow
        self._receive, self._whole, self._part = receive, whole, part
        self._lengths: dict[tuple[int, str], int] = {}
        """Length of the last object of each format."""

    async def read(self, job: TransferJob) -> Reading:
        """Read and verify an object. It is read whole if it is small, if its length is not known,
        if no place is free, or if the ranges are not of one object. No request is under way when
        this ends, however it ends."""
        if not isinstance(job.format, ChunkFormat) or not self._range_bytes:
            return await self._whole(job)
        try:
            reading = await self._in_ranges(job, job.format)
        except StoreUnranged as error:
            reading = await self._whole(job)
            if reading[0] is not None and reading[0].nbytes > 0:  # it has a first range
                self._range_bytes = 0
                _log.warning("%s. Objects are read by one GET each now", error)
        return await self._whole(job) if reading is None else reading

    async def _in_ranges(self, job: TransferJob, chunk: ChunkFormat) -> Reading | None:
        """Read the object in one range more than there are borrowed places. None without borrowed
        places, or if the ranges are not of one object. Its expected length is the last one's."""
        known = chunk.coverage, chunk.shard
        nbytes = min(job.nbytes, int(_MARGIN * self._lengths.get(known, job.nbytes)))
        reception = self._receive(job)
        with self._borrow(nbytes // self._range_bytes - 1) as (count, give_back):
            if not count:
                return None

            async def read(bounds: range) -> ObjectInfo | None:
                info = await self._read(job, bounds, reception)
                give_back()
                return info

            try:
                *ranges, last = cut(nbytes, 1 + count, self._unit)
                ranges.append(range(last.start, job.nbytes))
                infos = await all_of(map(read, ranges))
                if infos is None:
                    return None, None
                info = infos[0]
                pairs = zip(ranges, infos, strict=True)
                if not info.etag:
                    raise StoreUnranged(f"{job.key} has no ETag to compare its ranges by")
                if any(not _is_part(info, *pair) for pair in pairs):
                    return None
                if not reception.is_of(info.nbytes):  # a failed attempt was of another object
                    return None
                reason = await reception.check(info.nbytes)
                if reason is None:
                    self._lengths[known] = info.nbytes
                return info, reason
            finally:
                await reception.stop()

    async def _read(
        self, job: TransferJob, bounds: range, reception: Reception
    ) -> ObjectInfo | None:
        """Read a range. `_BEYOND` if the object ends before it."""
        try:
            info = await self._part(job, bounds, reception)
        except StoreUnranged:
            if bounds.start == 0:
                raise
            return _BEYOND
        if info is not None:
            reception.came(range(bounds.start, min(bounds.stop, info.nbytes)))
        return info


def _is_part(whole: ObjectInfo, bounds: range, part: ObjectInfo) -> bool:
    """Whether the answer for a range is of this object."""
    if part is _BEYOND:
        return whole.nbytes <= bounds.start
    return (part.etag, part.nbytes) == (whole.etag, whole.nbytes)


_BEYOND = ObjectInfo("", 0, 0.0)
_MARGIN = 1.02
"""Objects of one format differ in length by a few thousandths if they are compressed."""


def cut(nbytes: int, count: int, unit: int) -> list[range]:
    """The bytes of an object in `count` ranges of about the same length, in order, each of
    which begins at a multiple of `unit`: where an encrypted segment does. Pure."""
    inner = [nbytes * number // count for number in range(count)]
    ends = [end - end % unit for end in inner] + [nbytes]
    return [range(*bounds) for bounds in pairwise(ends)]
