"""The three tiers without vLLM: device, host memory and bucket behind one small API.

    async with await TieredStore.open(
        Config.parse({"bucket": "my-bucket"}),
        shapes={"kv": ((16, 2, 128), torch.bfloat16)},
        namespace={"model": "my-model"},
    ) as store:
        await store.put(block_hash, {"kv": tensor})
        hit = await store.get(block_hash, into={"kv": tensor})

An engine with a paged cache hands that over, and computes on its blocks:

    store = await TieredStore.open(..., pools={"kv": cache})  # [blocks, 16, 2, 128]
    block = await store.acquire(block_hash)
    if block is None:
        block = store.allocate()
        ...  # compute cache[block]
        store.put_block(block_hash, block)
    store.release(block)

and, beside such blocks, tensors of any number of rows by the hash of their content (`tensors`).
The same slab, I/O process, object format and ledger as under vLLM, driven by the caller's asyncio
loop. All methods are for that loop's thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any

import torch

from s3kv.block_tiers import BlockTiers
from s3kv.config import Config
from s3kv.device.blocks import GROUP, DeviceBlocks
from s3kv.device.caller import CallerStream
from s3kv.device.copies import BlockCopies
from s3kv.device.nearby import memory_near
from s3kv.device.pools import BlockPools
from s3kv.device.tensors import BlockTensors
from s3kv.errors import ConfigError
from s3kv.host_tier import HostTier
from s3kv.io.wire import Hello
from s3kv.objects.codec import ChunkFormat
from s3kv.objects.integrity import Integrity
from s3kv.objects.keys import Namespace, canonical_json, fingerprint_digest
from s3kv.planning.ledger import ChunkState
from s3kv.tensors import TensorRows, TensorStore
from s3kv.types import ChunkKey, Location

_SHARD = "t0of1-p0of1"


class TieredStore:
    """A store of equally shaped blocks by hash, and of tensors with rows if it was opened for them.
    Made by `open`, ended by `close`.
    """

    def __init__(self, config: Config, tensors: BlockTensors, tiers: BlockTiers) -> None:
        self._config = config
        self._tensors = tensors
        self._tiers = tiers
        self._host = tiers.host
        self._rows: TensorStore | None = None

    @classmethod
    async def open(
        cls,
        config: Config,
        *,
        shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
        namespace: Mapping[str, Any],
        device: str | torch.device = "cpu",
        device_blocks: int = 0,
        pools: Mapping[str, torch.Tensor] | None = None,
        pool_blocks: Iterable[int] | None = None,
        tensors: TensorRows | None = None,
    ) -> TieredStore:
        """Start on a bucket.

        shapes: what every block consists of: name to shape and dtype.
        namespace: plain values that say what the blocks mean (model, revision, …); two stores
            see each other's blocks when these, the shapes and the prefix are equal.
        device_blocks: blocks kept on `device` as a tier of its own, in memory that the store
            allocates; 0 for none.
        pools: the caller's memory for such a tier instead: name to `[blocks, *shape]`, all on one
            device. Blocks may lie apart; the dimensions of a block have to follow each other as
            they do in memory (give a permuted view, and its shape to `shapes`).
        pool_blocks: the numbers of the blocks that the store may use; None for all. On a GPU they
            are tried for the fastest way to copy: nobody else may use them from the call on.
        tensors: what `put_tensor` and `get_tensor` are to take, and their memory, which is not
            part of `host_bytes`; None for none. They have an I/O process of their own.
        Raises `ConfigError`, `ValueError` for pools that do not hold such blocks,
        `UnsupportedError` for memory that cannot be copied, or a `StoreError` when the bucket
        cannot be used.
        """
        blocks = BlockTensors(shapes)
        if pools is not None and device_blocks:
            raise ConfigError("device_blocks and pools are given: allowed is one of them")
        memory = BlockPools(blocks, pools) if pools is not None else None
        if device_blocks:
            memory = BlockPools.new(blocks, device_blocks, torch.device(device))
        chunk, hello = _identified(config, blocks, namespace)
        slot_bytes = -(-chunk.object_bytes // 4096) * 4096
        near = memory_near(memory.device if memory is not None else torch.device("cpu"))
        host = await HostTier.open(config, chunk, slot_bytes, hello, near)
        try:
            hot = None if memory is None else await _on_device(memory, pool_blocks, host, chunk)
        except BaseException:
            await host.pump.close(0.0)
            raise
        store = cls(config, blocks, BlockTiers(blocks, host, hot))
        if tensors is not None:
            await store._open_rows(tensors, namespace)
        return store

    async def __aenter__(self) -> TieredStore:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    # --- the tiers -------------------------------------------------------------------------

    async def put(self, block_hash: bytes, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Keep the block: in host memory, in the background in the bucket, and on the device if
        that is where the tensors are and not all of its blocks are in use.

        The tensors may be on any device; they are read before this returns and are the caller's
        again then. On a GPU, "read" and "returns" are in the order of the stream that is current.
        False when host memory is full of blocks the bucket does not have yet, or the copy failed:
        then nothing was kept there. Raises `ValueError` for tensors of another shape or dtype.
        """
        self._tensors.check(tensors)
        return await self._tiers.put(ChunkKey(GROUP, block_hash), tensors)

    async def get(self, block_hash: bytes, into: Mapping[str, torch.Tensor]) -> bool:
        """Fill `into` with the block, from the nearest tier that has it. False on a miss.

        On a GPU, `into` is filled for what the caller launches afterwards on the stream that was
        current at the call. On a miss, and when cancelled, what `into` holds is undefined.
        """
        self._tensors.check(into)
        return await self._tiers.get(ChunkKey(GROUP, block_hash), into)

    def prefetch(self, block_hashes: Iterable[bytes]) -> int:
        """Get these blocks on their way to host memory, without waiting for them.

        Returns how many are on their way or there already; the others the bucket is known not to
        have, or there is no room for.
        """
        on_their_way = 0
        for block_hash in block_hashes:
            key = ChunkKey(GROUP, block_hash)
            if self._host.state(key) is not ChunkState.ABSENT or self._host.fetch(key) is not None:
                on_their_way += 1
        return on_their_way

    def where(self, block_hash: bytes) -> Location:
        """Which tiers hold the block, as far as is known without asking."""
        key = ChunkKey(GROUP, block_hash)
        return Location(
            device=self._tiers.hot is not None and self._tiers.hot.holds(key),
            host=self._host.state(key) is ChunkState.RESIDENT,
            bucket=self._host.in_bucket(key),
        )

    # --- blocks of the pool ----------------------------------------------------------------

    async def acquire(self, block_hash: bytes) -> int | None:
        """The number of the pool's block that holds this, loaded straight into it if need be. It is
        held for the caller, and nobody writes to it, until `release`.

        Held by any number of callers; each releases it once. What the caller launches next may
        read it. None on a miss, and when all blocks are in use. Raises `ConfigError` in a store
        opened without pools.
        """
        return await self._tiers.acquire(self._pool(), ChunkKey(GROUP, block_hash))

    def allocate(self) -> int | None:
        """The number of a block to fill: free, or that of the hash unused for longest. It is held
        until `release`, and what the caller launches next may write to it. None when all are in
        use. Raises `ConfigError` in a store opened without pools.
        """
        return self._pool().take(self._tiers.stream())

    def put_block(self, block_hash: bytes, block: int) -> bool:
        """The held block holds this, as far as the caller has launched: found by `acquire` from now
        on, and on its way to host memory and the bucket. Returns at once; nobody writes to the
        block any more, and the caller may release it.

        If another block holds the same, that one stays the one to be found, and this is free after
        its release. False when host memory is full of blocks the bucket does not have yet: then the
        block is in the pool alone. Raises `ValueError` for a block the caller does not hold, or one
        with another hash; `ConfigError` in a store opened without pools.
        """
        return self._tiers.put_block(self._pool(), ChunkKey(GROUP, block_hash), block)

    def release(self, block: int) -> None:
        """The caller, and what it has launched on the stream that is current, is done with a block
        that it got from `acquire` or `allocate`. What was released first is evicted first, so
        release the end of a prefix before its beginning. Raises `ValueError` for a block that is
        not held.
        """
        self._pool().release(block, self._tiers.stream())

    # --- tensors with rows -----------------------------------------------------------------

    async def put_tensor(self, content_hash: bytes, tensor: torch.Tensor) -> bool:
        """As `TensorStore.put`. Raises `ConfigError` in a store opened without `tensors`."""
        return await self._opened_rows().put(content_hash, tensor)

    async def get_tensor(
        self, content_hash: bytes, device: str | torch.device | None = None
    ) -> torch.Tensor | None:
        """As `TensorStore.get`. Raises `ConfigError` in a store opened without `tensors`."""
        return await self._opened_rows().get(content_hash, device)

    def where_tensor(self, content_hash: bytes) -> Location:
        """As `TensorStore.where`. Raises `ConfigError` in a store opened without `tensors`."""
        return self._opened_rows().where(content_hash)

    @property
    def counters(self) -> Mapping[str, int]:
        """What has happened so far, in the words of the metrics."""
        return self._host.counters

    @property
    def tensor_counters(self) -> Mapping[str, int]:
        """The same of `put_tensor` and `get_tensor`."""
        return self._opened_rows().counters

    async def flush(self) -> None:
        """Wait until the bucket has answered for everything put so far."""
        await self._host.flush()
        if self._rows is not None:
            await self._rows.flush()

    async def close(self) -> None:
        """End what is under way and give everything back. Uploads get as long as they need, but
        no longer than `drain_timeout_s`. Idempotent.
        """
        closing = [self._tiers.close(self._config.drain_timeout_s)]
        if self._rows is not None:
            closing.append(self._rows.close())
        await asyncio.gather(*closing)

    # --- inside ----------------------------------------------------------------------------

    async def _open_rows(self, tensors: TensorRows, namespace: Mapping[str, Any]) -> None:
        try:
            self._rows = await TensorStore.open(self._config, tensors, namespace=namespace)
        except BaseException:
            await self.close()
            raise

    def _opened_rows(self) -> TensorStore:
        if self._rows is None:
            raise ConfigError(
                "this store was opened for blocks alone: say TieredStore.open(..., "
                "tensors=TensorRows(shape of one row, dtype)) to keep tensors by content hash"
            )
        return self._rows

    def _pool(self) -> DeviceBlocks:
        if self._tiers.hot is None:
            raise ConfigError(
                "this store was opened without blocks on a device: say TieredStore.open(..., "
                "pools={name: tensor [blocks, *shape]})"
            )
        return self._tiers.hot


def _identified(
    config: Config, blocks: BlockTensors, namespace: Mapping[str, Any]
) -> tuple[ChunkFormat, Hello]:
    """The object of a block, and what the I/O process has to know of it."""
    integrity = Integrity.of(config)
    identity = {
        "namespace": dict(namespace),
        "tensors": [_plain(t) for t in blocks.specs],
        "integrity": integrity.identity(),
    }
    place = Namespace(config.prefix, fingerprint_digest(identity))
    hello = Hello(
        config,
        place.prefix,
        place.digest,
        _SHARD,
        {GROUP: blocks.specs},
        integrity=integrity,
        manifest=canonical_json(identity),
    )
    return ChunkFormat(place.digest, blocks.specs, GROUP, _SHARD, integrity), hello


async def _on_device(
    pools: BlockPools, numbers: Iterable[int] | None, host: HostTier, chunk: ChunkFormat
) -> DeviceBlocks:
    ours = range(pools.count) if numbers is None else list(numbers)
    if min(ours, default=0) < 0 or max(ours, default=0) >= pools.count:
        raise ValueError(f"pool_blocks: allowed are 0 to {pools.count - 1}")
    stream = CallerStream.current(pools.device)

    def opened() -> BlockCopies:
        with stream:  # which also makes its device the current one of this thread
            return BlockCopies.open(
                {GROUP: pools.layout},
                host.slab.view,
                host.slot_bytes,
                {GROUP: chunk.header_bytes},
                idle=ours,
            )

    # Pinning host memory takes a second or so for a few GiB.
    copies = await asyncio.to_thread(opened)
    return DeviceBlocks(pools, ours, copies, stream.mark())


def _plain(spec: Any) -> dict[str, Any]:
    return {"name": spec.name, "dtype": spec.dtype, "shape": list(spec.shape)}
