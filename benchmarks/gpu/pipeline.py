"""The I/O process and the copies of one worker, driven as by its engine."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from time import perf_counter, sleep
from urllib.parse import quote

from benchmarks.gpu.rig import LONG_S, NAMESPACE, SHARD, CopyRig, ended
from s3kv.config import Config
from s3kv.device.copies import BlockCopies
from s3kv.io.client import IoClient
from s3kv.io.wire import Handshake
from s3kv.messages import BucketJob, CopyPart, JobKind
from s3kv.objects.keys import Namespace
from s3kv.types import ChunkKey

BUCKET = "benchmark"
PREFIX = "s3kv"
_POLL_S = 20e-6
_START_S = 60.0


class Pipeline:
    """Chunk `i` of the rig is object `i` and lies in slot `i`. `close` before the copies."""

    def __init__(self, rig: CopyRig, copies: BlockCopies, url: str) -> None:
        config = Config(bucket=BUCKET, prefix=PREFIX, endpoint_url=url, region="us-east-1")
        self.at_once = config.fetches_at_once(rig.format.object_bytes)
        self.copies = copies
        self._rig = rig
        self._keys = [
            ChunkKey(0, hashlib.sha256(str(i).encode()).digest()) for i in range(rig.count)
        ]
        namespace = Namespace(PREFIX, NAMESPACE)
        self.heads = [
            b"GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n"
            % quote(f"/{BUCKET}/{namespace.chunk(key, SHARD)}", safe="/-_.~").encode()
            for key in self._keys
        ]
        """Requests for whoever asks the server without s3kv."""
        self.places = [
            rig.slab.view[self._offset(i) :][: rig.format.object_bytes] for i in range(rig.count)
        ]
        handshake = Handshake(
            config,
            *(PREFIX, NAMESPACE, SHARD),
            {0: rig.format.tensors},
            slot_bytes=rig.slot_bytes,
        )
        self._client = IoClient(handshake, rig.slab)
        self._client.start()
        self._client.wait_ready(_START_S)

    def close(self) -> None:
        for place in self.places:
            place.release()
        self._client.close()

    def save_all(self) -> float:
        """Seconds until the bucket has all chunks."""
        begin_s = perf_counter()
        for i, blocks in enumerate(self._rig.sources):
            self.copies.save(i, 0, i, blocks)
        left_s = begin_s + LONG_S
        under_way = set(range(self._rig.count))
        while under_way:
            for end in self.copies.poll().saved:
                assert end.ok, end
                self._submit(end.job_id, JobKind.UPLOAD)
            self._client.flush()
            under_way -= self._ended_jobs()
            _pause(left_s)
        return perf_counter() - begin_s

    def fetch_all(self) -> float:
        return self._fetched(lambda numbers: len(list(numbers)))

    def fetch_and_load_all(self) -> float:
        def load(numbers: Iterable[int]) -> int:
            for i in numbers:
                part = CopyPart(0, i, 0, self._rig.targets[i])
                self.copies.load(str(i), [part])
            return ended(self.copies)

        return self._fetched(load)

    def _fetched(self, over: Callable[[Iterable[int]], int]) -> float:
        """Seconds until all are. over: takes those that have arrived since, tells how many are."""
        self._rig.machine.synchronize()
        begin_s = perf_counter()
        for i in range(self._rig.count):
            self._submit(i, JobKind.FETCH)
        self._client.flush()
        left = self._rig.count
        while left:
            left -= over(self._ended_jobs())
            _pause(begin_s + LONG_S)
        return perf_counter() - begin_s

    def _submit(self, number: int, kind: JobKind) -> None:
        self._client.submit(BucketJob(number, kind, self._keys[number], number))

    def _ended_jobs(self) -> set[int]:
        done = self._client.poll()
        for end in done:
            assert end.outcome.is_success, end
        return {end.job_id for end in done}

    def _offset(self, slot: int) -> int:
        return slot * self._rig.slot_bytes


def _pause(deadline_s: float) -> None:
    assert perf_counter() < deadline_s, f"not over in {LONG_S} s"
    sleep(_POLL_S)
