"""Store of blocks without vLLM: device, host memory and bucket behind one small API.

    async with TieredStore.open(
        Config.parse({"bucket": "my-bucket"}),
        shapes={"kv": ((16, 2, 128), torch.bfloat16)},
        namespace={"model": "my-model"},
    ) as store:
        await store.put(block_hash, {"kv": tensor})
        hit = await store.get(block_hash, into={"kv": tensor})

`docs/api.md` also has an example with the paged cache of an engine.

It uses the slab, I/O process, object format and ledger that the connectors use under vLLM, driven
by the caller's asyncio loop. All methods are for code that runs in that loop.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from operator import index
from typing import Any

import torch

from s3kv.config import Config
from s3kv.device.copies import BlockCopies
from s3kv.device.selection import memory_near
from s3kv.device.tensors import BlockTensors
from s3kv.errors import ConfigError
from s3kv.io.tier import introduce
from s3kv.library.block_tiers import BlockTiers
from s3kv.library.caller_streams import current_stream, mark, on
from s3kv.library.device_tier import GROUP, BlockPools, DeviceBlocks
from s3kv.library.host_tier import HostTier
from s3kv.library.opening import Opening, plain_namespace
from s3kv.library.pump import carried, in_thread, succeeded
from s3kv.objects.keys import WHOLE, checked_key
from s3kv.types import ChunkKey, Location


class TieredStore:
    """A store of equally shaped blocks by hash. It is made by `open` and ended by `close`.

    A hash is 1 to 64 `bytes`. Another type raises `TypeError`; so do a bytearray and a memoryview,
    because they may change. Another length raises `ValueError`.

    A call may be cancelled at any time. If it is copying from or to the caller's tensors, it ends
    that copy in memory before it raises `CancelledError`; afterwards the tensors are the caller's
    alone. A cancelled `put` may or may not have kept its block.

    After `close` has been called, every method but `close` raises `ClosedError`; `counters` can
    still be read. In a store opened without blocks on a device, the methods for them raise
    `ConfigError`.
    """

    def __init__(self, tensors: BlockTensors, tiers: BlockTiers) -> None:
        self._tensors = tensors
        self._tiers = tiers
        self._host = tiers.host

    @classmethod
    def open(
        cls,
        config: Config,
        *,
        shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
        namespace: Mapping[str, Any],
        pools: Mapping[str, torch.Tensor] | None = None,
        pool_blocks: Iterable[int] | None = None,
    ) -> Opening[TieredStore]:
        """Open a store on a bucket. Await the result, or enter it with `async with`, which closes
        the store.

        shapes: the tensors of every block: name to shape and dtype.
        namespace: plain values that define what the blocks mean (model, revision, …). Two stores
            share blocks if these, the shapes in their order, and the prefix are equal.
        pools: the caller's memory for a tier of blocks on a device: name to `[blocks, *shape]`, all
            on one device; None for no such tier. Blocks may lie apart. The dimensions of a block
            have to follow each other as they do in memory (give a permuted view, and its shape to
            `shapes`).
        pool_blocks: the numbers of the blocks that the store may use; None for all.
        Raises `ConfigError`, also for a namespace of other values; `ValueError` for shapes that the
        object format cannot hold, and for pools that do not hold such blocks; `TypeError` for names
        that are not text, and sizes or block numbers that are not integers; `UnsupportedError` for
        memory that cannot be copied, and for a GPU without memory for staging; `IoProcessError` if
        the I/O process does not start; a `StoreError` if the bucket cannot be used.
        """

        async def opened() -> TieredStore:
            blocks = BlockTensors(shapes)
            memory = None if pools is None else BlockPools(blocks, pools)
            if pool_blocks is not None and memory is None:
                raise ConfigError("pool_blocks is given, and pools is not")
            identity = {
                "namespace": plain_namespace(namespace),
                "tensors": [asdict(spec) for spec in blocks.specs],
            }
            handshake = introduce(config, identity, WHOLE, {GROUP: blocks.specs})
            near = memory_near(memory.device if memory is not None else torch.device("cpu"))
            host = await HostTier.open(handshake, near)
            try:
                hot = None if memory is None else await _on_device(memory, pool_blocks, host)
            except BaseException:
                await host.close(0.0)
                raise
            return cls(blocks, BlockTiers(blocks, host, hot))

        return Opening(opened())

    async def put(
        self, block_hash: bytes, tensors: Mapping[str, torch.Tensor], *, wait: bool = False
    ) -> bool:
        """Keep the block in host memory, and upload it to the bucket in the background. (For a
        block of the pool, use `put_block`.)

        The tensors may be on any device. They are read before this returns, and then belong to the
        caller again. If the block is being fetched, this waits for the end of the fetch.

        wait: wait for room, instead of returning False, while host memory is full of blocks that
            are on their way to or from the bucket.
        Returns False if nothing was kept in host memory: there was no room, or the copy failed,
        which is logged. Raises `ValueError` for tensors of another shape or dtype.
        """
        key = self._key(block_hash)
        self._tensors.check(tensors)
        return await self._tiers.put(key, tensors, wait=wait)

    async def get(self, block_hash: bytes, into: Mapping[str, torch.Tensor]) -> bool:
        """Fill `into` with the block, from host memory or the bucket. Returns False on a miss.

        `into` is filled when this returns, also on a GPU. After a miss or a cancelled call its
        content is undefined, and nothing writes to it any more. Raises `ValueError` as `put` does,
        and `CopyError` if the device refuses the copy.
        """
        key = self._key(block_hash)
        self._tensors.check(into)
        return await self._tiers.get(key, into)

    def prefetch(self, block_hashes: Iterable[bytes]) -> int:
        """Start fetching these blocks to host memory, without waiting for them.

        Returns how many are there already or on their way. The others are known to be absent from
        the bucket, or cannot be fetched now: fetches under way fill at most half of host memory,
        and none is started while the bucket does not answer.
        """
        return self._host.prefetch([self._key(block_hash) for block_hash in block_hashes])

    def where(self, block_hash: bytes) -> Location:
        """The tiers that hold the block, as far as is known without asking the bucket."""
        key, host, hot = self._key(block_hash), self._host, self._tiers.hot
        on_device = hot is not None and hot.holds(key)
        bucket = host.ledger.index.verdict(key, time.monotonic())
        return Location(device=on_device, host=host.holds(key), bucket=bucket)

    async def acquire(self, block_hash: bytes) -> int | None:
        """The number of the pool's block that holds this hash. The block is loaded from another
        tier if necessary. It is held for the caller, and not written to, until `release`.

        Any number of callers may hold a block; each releases it once. Work that the caller
        launches next may read the block. None on a miss, and if all blocks are in use.
        """
        key = self._key(block_hash)
        return await self._tiers.acquire(self._pool(), key)

    def allocate(self) -> int | None:
        """The number of a block to fill: a free one, or else the one that has been unused longest.
        It is held until `release`, and work that the caller launches next may write to it. None if
        all blocks are in use."""
        return self._pool().take(self._tiers.stream())

    def put_block(self, block_hash: bytes, block: int) -> bool:
        """Name a held block that the work launched so far fills with this hash. `acquire` finds it
        from now on, and its copy to host memory and the bucket begins. Returns at once. The block
        must not be written to any more; the caller may release it.

        If another block already holds the hash, `acquire` still finds that one, and this block is
        free after its release. If the hash is being fetched, the block is saved only if the fetch
        fails to bring it.
        Returns False if host memory is full of blocks that the bucket does not have yet; then the
        block is only in the pool. Raises `ValueError` for a block that the caller does not hold,
        or one with another hash.
        """
        key = self._key(block_hash)
        return self._tiers.put_block(self._pool(), key, index(block))

    def release(self, block: int) -> None:
        """Release a block from `acquire` or `allocate`, after the work that the caller has launched
        on the current stream. Blocks released first are evicted first, so release the end of a
        prefix before its beginning. Raises `ValueError` for a block that is not held."""
        self._pool().release(index(block), self._tiers.stream())

    @property
    def counters(self) -> Mapping[str, int]:
        """Counts of events so far, by name. Can be read after `close`, too."""
        return self._host.ledger.counters

    async def flush(self) -> tuple[bytes, ...]:
        """Wait until everything put so far is in the bucket or given up.

        A failed upload is retried for a minute and a half. An object that the bucket had long
        before the put may have been deleted since; this is checked, and it is uploaded again.
        Returns the hashes that the bucket does not have: those put since the last `flush`, and
        earlier ones still in host memory. The latter are not lost while they stay there.
        """
        self._host.pump.check_open()
        return await self._tiers.flush()

    async def close(self) -> None:
        """End all work under way and release everything. Uploads get the time they need, up to
        `drain_timeout_s`; the log reports how much did not reach the bucket.

        Fetches are cancelled, and calls that wait for one get a miss. Calls that wait for room or
        in `flush` raise `ClosedError`. Idempotent. Even a cancelled `close` ends only when the
        store is closed. Raises `RuntimeError` in another loop, unless that of `open` is closed.
        """
        await self._host.close()

    async def __aenter__(self) -> TieredStore:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _key(self, block_hash: bytes) -> ChunkKey:
        self._host.pump.check_open()
        return checked_key(GROUP, block_hash)

    def _pool(self) -> DeviceBlocks:
        self._host.pump.check_open()
        if self._tiers.hot is None:
            raise ConfigError("this store has no blocks on a device: open it with pools={...}")
        return self._tiers.hot


async def _on_device(
    pools: BlockPools, numbers: Iterable[int] | None, host: HostTier
) -> DeviceBlocks:
    ours = range(pools.count) if numbers is None else [index(number) for number in numbers]
    if min(ours, default=0) < 0 or max(ours, default=0) >= pools.count:
        raise ValueError(f"pool_blocks: allowed are 0 to {pools.count - 1}")
    stream = current_stream(pools.device)
    headers = {GROUP: host.chunk.header_bytes}

    def opened() -> BlockCopies:
        with on(stream):
            return BlockCopies.open({GROUP: pools.layout}, host.slab.view, host.slot_bytes, headers)

    # Pinning host memory takes a second or so for a few GiB.
    opening = in_thread(opened)
    try:
        return DeviceBlocks(pools, ours, await carried(opening), mark(stream))
    except BaseException:
        if succeeded(opening):
            opening.result().close()
        raise
