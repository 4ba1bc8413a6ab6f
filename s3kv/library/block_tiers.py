"""Block copies between a caller's tensors, the blocks of its pool, and host memory.

tensors of a call ──copy in a thread, beside the caller's later work──▶ slot
block of the pool ──save──▶ slot ──load──▶ block of the pool
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from functools import partial

import torch

from s3kv.device.tensors import BlockTensors
from s3kv.errors import CopyError
from s3kv.host.table import Entry
from s3kv.library.caller_streams import Beside, CallerStream, current_stream
from s3kv.library.device_tier import DeviceBlocks
from s3kv.library.host_tier import HostTier
from s3kv.library.pump import carried, claimed, in_thread
from s3kv.planning.job import Job
from s3kv.planning.ledger import ChunkState
from s3kv.types import ChunkKey

logger = logging.getLogger("s3kv")

Tensors = Mapping[str, torch.Tensor]


class BlockTiers:
    """The device and host tiers of one store. Used from the thread of the host tier's loop.

    hot: the device tier; None without one. Closing `host` closes `hot` before the slab.
    """

    def __init__(self, tensors: BlockTensors, host: HostTier, hot: DeviceBlocks | None) -> None:
        self.host, self.hot, self._tensors = host, hot, tensors
        self._loading: dict[ChunkKey, asyncio.Future[int | None]] = {}
        self._waiting_puts: set[asyncio.Future[bool]] = set()
        """Puts that wait because their hash is already in flight to host memory."""
        if hot is not None:
            host.watch(hot.poll, hot.close)

    def stream(self) -> CallerStream:
        """The caller's current stream."""
        return None if self.hot is None else current_stream(self.hot.pools.device)

    async def put(self, key: ChunkKey, tensors: Tensors, *, wait: bool) -> bool:
        beside = Beside(tensor.device for tensor in tensors.values())

        async def save(job: Job) -> bool:
            copy = partial(self._tensors.copy_out, tensors, self._payload(job.entry.number))
            copying = in_thread(partial(beside, copy), self.host.pump.copy_threads)
            return await self.host.copied_by(job, copying)

        return await self.host.pump.call(self.host.put_by(key, save, wait=wait))

    async def get(self, key: ChunkKey, into: Tensors) -> bool:
        beside = Beside(tensor.device for tensor in into.values())
        return await self.host.pump.call(self._get(key, into, beside))

    async def acquire(self, hot: DeviceBlocks, key: ChunkKey) -> int | None:
        stream = self.stream()
        if (number := hot.acquire(key, stream)) is not None:
            self.host.ledger.counters["device_hits"] += 1
            self.host.hit(key)
            return number
        return await self.host.pump.call(self._acquire(hot, key, stream))

    def put_block(self, hot: DeviceBlocks, key: ChunkKey, number: int) -> bool:
        stream = self.stream()
        hot.name(number, key, stream)
        state = self.host.ledger.state(key)
        if state is ChunkState.RESIDENT:
            self.host.hit(key)
            return True
        if state is not ChunkState.ABSENT:
            self._put_later(hot, key, stream)
            return True
        job = self.host.reserve(key)
        if job is None:
            return False
        self._save(hot, job, number, stream)
        return True

    async def flush(self) -> tuple[bytes, ...]:
        """Wait for the puts under way, then flush as `HostTier.flush` does."""
        if self._waiting_puts:
            await asyncio.wait(self._waiting_puts)
        return await self.host.flush()

    def _put_later(self, hot: DeviceBlocks, key: ChunkKey, stream: CallerStream) -> None:
        """Save the block that holds `key`, unless it is in host memory, or on its way there."""
        number = hot.acquire(key, stream)
        assert number is not None, "it has just been named"

        async def save(job: Job) -> bool:
            return await asyncio.shield(self._save(hot, job, number, stream))

        putting = asyncio.get_running_loop().create_task(self.host.put_by(key, save))
        self._waiting_puts.add(putting)
        putting.add_done_callback(self._waiting_puts.discard)
        putting.add_done_callback(lambda _: hot.release(number, stream))
        self.host.pump.start(putting)

    def _save(
        self, hot: DeviceBlocks, job: Job, number: int, stream: CallerStream
    ) -> asyncio.Future[bool]:
        """Start the copy of a held block to host memory. The block may be released at once."""
        saved: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def ended(ok: bool) -> None:
            self.host.copied(job, ok)
            saved.set_result(ok)

        hot.save(job.job_id, job.entry.number, number, stream, ended)
        self.host.pump.start(saved)
        self.host.pump.wake()
        return saved

    async def _get(self, key: ChunkKey, into: Tensors, beside: Beside) -> bool:
        slot = await self.host.pinned(key)
        if slot is None:
            return False
        try:
            copy = partial(self._tensors.copy_in, self._payload(slot.number), into)
            await carried(in_thread(partial(beside, copy), self.host.pump.copy_threads))
        except RuntimeError as error:
            raise CopyError(f"a copy to the caller's tensors failed: {error}") from error
        finally:
            self.host.unpin(slot)
        return True

    async def _acquire(self, hot: DeviceBlocks, key: ChunkKey, stream: CallerStream) -> int | None:
        slot = await self.host.pinned(key)
        if slot is None:
            return None
        try:
            return await self._load(hot, key, slot, stream)
        finally:
            self.host.unpin(slot)

    async def _load(
        self, hot: DeviceBlocks, key: ChunkKey, slot: Entry, stream: CallerStream
    ) -> int | None:
        """Load a pinned slot. Returns the block, held for the caller; None if the load failed or
        all blocks are in use. Concurrent calls share one load."""
        while (number := hot.acquire(key, stream)) is None and key in self._loading:
            await asyncio.wait([self._loading[key]])
        if number is not None:
            return number
        loaded = self._loaded(hot, key, slot)
        if loaded is None:
            self.host.ledger.counters["loads_without_block"] += 1
            return None
        number = await claimed(loaded, lambda number: hot.release(number, stream))
        if number is not None:
            hot.wait_written(number, stream)
        return number

    def _loaded(
        self, hot: DeviceBlocks, key: ChunkKey, slot: Entry
    ) -> asyncio.Future[int | None] | None:
        """Start a load of a slot, which stays pinned until its end. None if no block is free."""
        loaded: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()

        def ended(number: int | None) -> None:
            del self._loading[key]
            self.host.unpin(slot)
            self.host.ledger.counters["loads" if number is not None else "loads_failed"] += 1
            loaded.set_result(number)

        if not hot.load(slot.number, key, ended):
            return None
        self.host.ledger.table.pin(slot)
        self._loading[key] = loaded
        self.host.pump.start(loaded)
        self.host.pump.wake()
        return loaded

    def _payload(self, slot: int) -> torch.Tensor:
        return torch.frombuffer(self.host.payload(slot), dtype=torch.uint8)
