"""What a server gives plain sockets: the floor of whatever is measured against it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.sockets import RawConnection, exchange_all, head, raw_get
from lab.s3 import S3Server

AT_ONCE = (8, 16, 32)
"""Connections at once. The number that is best for a server is the floor."""
TIMES = 5
"""How often each object is read with each number of connections. Where first bytes are late at
random, the best of two medians of few batches would be better than either number of connections."""


class Server:
    """A bucket, read with blocking sockets in threads and nothing else, over all rounds."""

    def __init__(self, url: str, bucket: str, env: Mapping[str, str]) -> None:
        self._s3 = S3Server(url, dict(env))
        self._bucket = bucket
        self._url = url
        self._seconds: dict[int, list[float]] = {}

    def told(self) -> dict[str, Any]:
        """Of all batches so far, with the number of connections that was best: that number, how
        many batches it read, and their median."""
        if not self._seconds:
            return {"connections": None, "batches": 0, "median_ms": None}
        best = min(self._seconds, key=lambda count: statistics.median(self._seconds[count]))
        seconds = self._seconds[best]
        median_ms = round(1e3 * statistics.median(seconds), 1)
        return {"connections": best, "batches": len(seconds), "median_ms": median_ms}

    def read(self, prefix: str, per_batch: int) -> None:
        """Read all objects under `prefix` some times, `per_batch` after one another, with each
        number of connections in turn.

        More connections than objects in a batch are not opened.
        """
        objects = sorted(self._s3.objects(self._bucket, prefix).items())
        client = self._s3.client()
        heads = [head(client, "GET", self._bucket, key) for key, _ in objects]
        buffers = [memoryview(bytearray(b"\x5a") * nbytes) for _, nbytes in objects]
        starts = range(0, len(objects) - per_batch + 1, per_batch)
        batches = [slice(start, start + per_batch) for start in starts]
        counts = sorted({min(count, per_batch) for count in AT_ONCE})
        connections = [RawConnection(self._url) for _ in range(counts[-1])]
        try:
            for _ in range(TIMES):
                for count in counts:
                    self._seconds.setdefault(count, []).extend(
                        exchange_all(raw_get, connections[:count], heads[b], buffers[b])
                        for b in batches
                    )
        finally:
            for connection in connections:
                connection.close()
