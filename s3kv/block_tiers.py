"""How a block moves between a caller's tensors, the blocks of its pool, and host memory.

    tensors on the pool's device ──copy on the caller's stream──▶ block of the pool ──save──▶ slot
    tensors elsewhere, or no block free ──────────────copy beside it──────────────────────▶ slot

and back the same ways.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import torch

from s3kv.device.blocks import DeviceBlocks
from s3kv.device.caller import Beside, CallerStream
from s3kv.device.tensors import BlockTensors
from s3kv.host.slots import Slot
from s3kv.host_tier import HostTier
from s3kv.messages import SaveOrder
from s3kv.planning.ledger import ChunkState
from s3kv.types import ChunkKey

Tensors = Mapping[str, torch.Tensor]


class BlockTiers:
    """For the thread of the host tier's loop. `hot` is closed by `close`, and so is `host`."""

    def __init__(self, tensors: BlockTensors, host: HostTier, hot: DeviceBlocks | None) -> None:
        self.host = host
        self.hot = hot
        self._tensors = tensors
        self._loading: dict[ChunkKey, asyncio.Future[int | None]] = {}
        if hot is not None:
            host.watch(hot.poll)

    def stream(self) -> CallerStream:
        """What the caller works on now."""
        return CallerStream.current(
            self.hot.device if self.hot is not None else torch.device("cpu")
        )

    async def put(self, key: ChunkKey, tensors: Tensors) -> bool:
        stream = self.stream()
        beside = Beside(tensor.device for tensor in tensors.values())
        held = self._placed(key, tensors, stream)
        return await self.host.pump.whole(self._put(key, tensors, held, stream, beside))

    async def get(self, key: ChunkKey, into: Tensors) -> bool:
        stream, beside = self.stream(), Beside(tensor.device for tensor in into.values())
        return await self.host.pump.whole(self._get(key, into, stream, beside))

    async def acquire(self, hot: DeviceBlocks, key: ChunkKey) -> int | None:
        stream = self.stream()
        number = hot.acquire(key, stream)
        if number is not None:
            self.host.counters["device_hits"] += 1
            return number
        call = self.host.pump.start(self._acquire(hot, key, stream))
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            call.add_done_callback(self._give_back)
            raise

    def put_block(self, hot: DeviceBlocks, key: ChunkKey, number: int) -> bool:
        stream = self.stream()
        hot.name(number, key, stream)
        if self.host.state(key) is not ChunkState.ABSENT:
            return True
        order = self.host.reserve(key)
        if order is None:
            return False
        self.host.pump.start(self._saved(order, self._save(hot, order, number, stream)))
        return True

    async def close(self, drain_timeout_s: float) -> None:
        await self.host.pump.close(drain_timeout_s)
        if self.hot is not None:
            await asyncio.to_thread(self.hot.close)

    # --- to host memory --------------------------------------------------------------------

    def _placed(self, key: ChunkKey, tensors: Tensors, stream: CallerStream) -> int | None:
        """The block of the pool that holds the tensors from now on, held; None without one."""
        hot = self.hot
        if hot is None or not _are_on(hot.device, tensors):
            return None
        number = hot.acquire(key, stream)
        if number is None and (number := hot.take(stream)) is not None:
            with stream:
                hot.write(number, tensors)
            hot.name(number, key, stream)
        return number

    async def _put(
        self,
        key: ChunkKey,
        tensors: Tensors,
        held: int | None,
        stream: CallerStream,
        beside: Beside,
    ) -> bool:
        hot = self.hot
        try:
            if self.host.state(key) is not ChunkState.ABSENT:
                return True
            order = self.host.reserve(key)
            if order is None:
                return False
            if hot is not None and held is not None:
                return await self._saved(order, self._save(hot, order, held, stream))
            return await self._copied_out(order, tensors, beside)
        finally:
            if hot is not None and held is not None:
                hot.release(held, stream)

    def _save(
        self, hot: DeviceBlocks, order: SaveOrder, number: int, stream: CallerStream
    ) -> asyncio.Future[bool]:
        ended: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        hot.save(order.job_id, order.slot, number, stream, ended.set_result)
        self.host.pump.wake()
        return ended

    async def _saved(self, order: SaveOrder, ended: asyncio.Future[bool]) -> bool:
        ok = await ended
        self.host.copied(order, ok)
        return ok

    async def _copied_out(self, order: SaveOrder, tensors: Tensors, beside: Beside) -> bool:
        payload = self._payload(order.slot)
        try:
            await asyncio.to_thread(beside, lambda: self._tensors.copy_out(tensors, payload))
        except RuntimeError:
            self.host.copied(order, ok=False)
            raise
        self.host.copied(order, ok=True)
        return True

    # --- from host memory ------------------------------------------------------------------

    async def _get(
        self, key: ChunkKey, into: Tensors, stream: CallerStream, beside: Beside
    ) -> bool:
        hot = self.hot
        if hot is not None and (number := hot.acquire(key, stream)) is not None:
            self.host.counters["device_hits"] += 1
            return await self._copied_from(hot, number, into, stream, beside)
        slot = await self.host.pinned(key)
        if slot is None:
            return False
        try:
            if hot is not None and _are_on(hot.device, into):
                number = await self._load(hot, key, slot, stream)
                if number is not None:
                    return await self._copied_from(hot, number, into, stream, beside)
            payload = self._payload(slot.number)
            await asyncio.to_thread(beside, lambda: self._tensors.copy_in(payload, into))
        finally:
            self.host.unpin(slot)
        return True

    async def _copied_from(
        self, hot: DeviceBlocks, number: int, into: Tensors, stream: CallerStream, beside: Beside
    ) -> bool:
        """Copy from a held block, and release it."""
        try:
            with stream:
                if _are_on(hot.device, into):
                    hot.read(number, into)
                    return True
                after = Beside([hot.device])
            await asyncio.to_thread(after, lambda: beside(lambda: hot.read(number, into)))
        finally:
            hot.release(number, stream)
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
        self, hot: DeviceBlocks, key: ChunkKey, slot: Slot, stream: CallerStream
    ) -> int | None:
        """The block with what is in a pinned slot, held; one load, however many wait for it. None
        when it failed, or all blocks are in use.
        """
        while (number := hot.acquire(key, stream)) is None and key in self._loading:
            await self._loading[key]
        if number is not None:
            return number
        ended: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        if not hot.load(slot.number, key, ended.set_result):
            self.host.counters["loads_without_block"] += 1
            return None
        self._loading[key] = ended
        self.host.pump.wake()
        try:
            number = await ended
        finally:
            del self._loading[key]
        self.host.counters["loads" if number is not None else "loads_failed"] += 1
        if number is not None:
            hot.wait_written(number, stream)
        return number

    def _give_back(self, call: asyncio.Future[int | None]) -> None:
        """Nobody waits any more for the block that this call has brought."""
        if call.cancelled() or call.exception() is not None:
            return
        number = call.result()
        if self.hot is not None and number is not None:
            self.hot.release(number, self.stream())

    def _payload(self, slot: int) -> torch.Tensor:
        return torch.frombuffer(self.host.payload(slot), dtype=torch.uint8)


def _are_on(device: torch.device, tensors: Tensors) -> bool:
    return all(tensor.device == device for tensor in tensors.values())
