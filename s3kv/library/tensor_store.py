"""Store of plain tensors by the hash of their content: host memory and bucket, without vLLM.

    rows = TensorRows((1408,), torch.bfloat16)
    async with TensorStore.open(config, rows, namespace={"model": "my-encoder"}) as store:
        await store.put(content_hash, embeddings)  # [any number, 1408]
        embeddings = await store.get(content_hash)

It is made for an encoder's outputs for images and clips: tensors that share the shape of a row and
differ in the number of rows. It uses the ledger, object format and I/O process of the EC
connector. A caller that asks by hash does not know the number of rows. So an object holds the
tensor as one long row, whose length follows from the object's length. That way every byte of the
header is known before it is compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from s3kv.config import Config
from s3kv.device.selection import chosen_device
from s3kv.device.tensors import TensorRows, dtype_name
from s3kv.errors import ConfigError
from s3kv.host.room import PAGE_BYTES, Extents, order_of
from s3kv.host.table import Table
from s3kv.io.tier import introduce
from s3kv.library.base import Opening, Store, plain_namespace
from s3kv.library.pump import opened
from s3kv.library.tensor_tier import TensorTier
from s3kv.objects.item_format import GROUP, HEADER_BYTES, SHARD
from s3kv.types import Location, Span

__all__ = ["TensorRows", "TensorStore"]

_BERTHS_MAX = 8
_BERTHS_SHARE = 4
"""Berths take at most one part in this many of the memory, but there is always one."""


class TensorStore(Store):
    """A store of tensors by content hash. It is made by `open` and ended by `close`. All methods
    are for the loop that opened it.

    A hash is 1 to 64 `bytes`. Another type raises `TypeError`, another length `ValueError`. After
    `close` every method but `close` raises `ClosedError`; `counters` can still be read.
    """

    def __init__(self, rows: TensorRows, tier: TensorTier) -> None:
        super().__init__(GROUP, tier)
        self.tier = tier
        self._rows = rows

    @classmethod
    def open(
        cls, config: Config, rows: TensorRows, *, namespace: Mapping[str, Any]
    ) -> Opening[TensorStore]:
        """Open a store on a bucket. Await the result, or enter it with `async with`, which closes
        the store. `rows` gives the amount of memory, and `max_item_bytes` limits a tensor;
        `host_bytes` of `config` does not count here.

        namespace: plain values that say what the tensors mean (model, revision, …). Two stores
            see each other's tensors if these, the row's shape, the dtype and the prefix are equal.
        Raises `ConfigError`, or a `StoreError` if the bucket cannot be used.
        """

        async def store() -> TensorStore:
            table, berths = _divided(config, rows)
            identity = {
                "namespace": plain_namespace(namespace),
                "row": {"dtype": dtype_name(rows.dtype), "shape": list(rows.shape)},
            }
            hello = introduce(config, identity, SHARD, item_dtype=dtype_name(rows.dtype))
            return cls(rows, TensorTier(rows, table, berths, await opened(hello, rows.host_bytes)))

        return Opening(store())

    async def put(self, content_hash: bytes, tensor: torch.Tensor, *, wait: bool = False) -> bool:
        """Keep the tensor in host memory, and upload it to the bucket in the background.

        The tensor may be on any device. It is read before this returns or raises `CancelledError`,
        and is the caller's again then. If the tensor is being fetched, this waits for the end of
        the fetch. A failed upload is logged and tried again for a minute and a half. After that the
        tensor is in host memory alone, and may be evicted; the next `put`, `get` or `flush` tries
        the upload again.

        wait: wait for room, instead of returning False, while memory is full of tensors whose
            upload the bucket has not confirmed yet.
        Returns False if nothing was kept: the tensor is larger than `max_item_bytes`, there was no
        room, or the copy failed, which is logged. Raises `ValueError` for a tensor that the store
        was not opened for.
        """
        key = self._key(content_hash)
        self._rows.check(tensor)
        return await self.tier.pump.call(self.tier.put(key, tensor, wait=wait))

    async def get(
        self, content_hash: bytes, device: str | torch.device | None = None
    ) -> torch.Tensor | None:
        """A new tensor, from host memory or the bucket, that belongs to the caller. None on a miss,
        which includes an object that is damaged, late or larger than `max_item_bytes`.

        device: the device of the new tensor; None for host memory.
        Raises `UnsupportedError` for a device that torch cannot use here, `CopyError` if the
        device refuses the copy.
        """
        key = self._key(content_hash)
        where = chosen_device("cpu" if device is None else device)
        return await self.tier.pump.call(self.tier.get(key, where))

    def where(self, content_hash: bytes) -> Location:
        """The tiers that hold the tensor, as far as is known without asking the bucket."""
        return self._location(self._key(content_hash))

    async def flush(self) -> tuple[bytes, ...]:
        """Wait until every tensor put so far is in the bucket or given up. Returns the hashes that
        the bucket does not have, as `TieredStore.flush` does.
        """
        self._check_open()
        return await self.tier.flush()


def _divided(config: Config, rows: TensorRows) -> tuple[Table, list[Span]]:
    """Divide the memory into a table that can hold the largest item, and berths behind it. Raises
    `ConfigError` if the memory is too small, or the largest item for one row.
    """
    shortest = HEADER_BYTES + rows.row_bytes
    if shortest > config.max_item_bytes:
        raise ConfigError(
            f"max_item_bytes is {config.max_item_bytes}: allowed is {shortest} or more, for one row"
        )
    berth_pages = -(-config.max_item_bytes // PAGE_BYTES)
    berth_bytes = berth_pages * PAGE_BYTES
    least = berth_bytes + (1 << order_of(berth_pages)) * PAGE_BYTES
    if rows.host_bytes < least:
        raise ConfigError(
            f"host_bytes of the tensors is {rows.host_bytes}: allowed is {least} or more while "
            f"max_item_bytes is {config.max_item_bytes}. Set max_item_bytes to the largest tensor "
            "you have, or give them more memory"
        )
    share = rows.host_bytes // _BERTHS_SHARE // berth_bytes
    count = max(1, min(_BERTHS_MAX, share))
    table_bytes = (rows.host_bytes // PAGE_BYTES - count * berth_pages) * PAGE_BYTES
    offsets = (table_bytes + n * berth_bytes for n in range(count))
    berths = [Span(offset, config.max_item_bytes) for offset in offsets]
    return Table(Extents.of(table_bytes)), berths
