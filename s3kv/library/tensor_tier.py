"""Host tier of tensors: fetches objects whose length is unknown until they have arrived.

An object is fetched to a *berth*, a place as large as the largest object, and then copied to a
place of its own size. If the table reserved the largest size for each fetch, a small tensor would
evict as much as the largest one.

    absent ──get: fetched to a berth, verified, copied──▶ resident
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from functools import partial

import torch

from s3kv.device.tensors import TensorRows
from s3kv.errors import CopyError
from s3kv.host.table import Entry, EntryState, Table
from s3kv.io.tier import Tier
from s3kv.library.caller_streams import Beside
from s3kv.library.host_tier import HostTier
from s3kv.library.pump import carried, in_thread, succeeded
from s3kv.messages import JobEnd, JobKind, SaveOrder
from s3kv.objects.item_format import HEADER_BYTES
from s3kv.planning.ledger import ChunkState, Job
from s3kv.types import ChunkKey, ItemShape, Outcome, Span


class TensorTier(HostTier):
    """The host tier of tensors. Used on the thread of the loop that made it. `close` closes `tier`.

    table, berths: the two parts of the slab.
    """

    what = "tensors"

    def __init__(self, rows: TensorRows, table: Table, berths: list[Span], tier: Tier) -> None:
        super().__init__(table, tier, index_size=500_000)
        self._rows = rows
        self._max_bytes = tier.hello.config.max_item_bytes
        self._berths = list(berths)
        """Free berths."""
        self._moored: dict[int, Span] = {}
        """Berths of the fetches under way, by job id."""
        self._waiting: deque[Job] = deque()
        """Fetches that wait for a berth."""
        self._unloading: set[ChunkKey] = set()
        """Keys that are being copied from their berth to their place."""

    def state(self, key: ChunkKey) -> ChunkState:
        return ChunkState.COPYING if key in self._unloading else super().state(key)

    async def put(self, key: ChunkKey, tensor: torch.Tensor, *, wait: bool) -> bool:
        nbytes = HEADER_BYTES + len(tensor) * self._rows.row_bytes
        if nbytes > self._max_bytes and not self.holds(key):
            self.counters["items_too_large"] += 1
            return False

        async def fill(order: SaveOrder) -> bool:
            copy = partial(self._tensor_at(self._place(key)).copy_, tensor.detach())
            copying = in_thread(partial(Beside([tensor.device]), copy))
            return await self.copied_by(order, copying)

        kept = await self.put_by(key, fill, nbytes, wait=wait)
        if kept:
            self._save_again(key)
        return kept

    async def get(self, key: ChunkKey, device: torch.device) -> torch.Tensor | None:
        if self.holds(key):
            self.counters["hits"] += 1
        entry = await self.pinned(key)
        if entry is None:
            return None
        try:
            return await carried(in_thread(partial(self._tensor_at(entry).to, device, copy=True)))
        except RuntimeError as error:
            raise CopyError(f"a copy to {device} failed: {error}") from error
        finally:
            self.unpin(entry)

    # --- fetches ---------------------------------------------------------------------------

    def _order_fetch(self, key: ChunkKey) -> Job:
        job = self.ledger.plan_landing(key)
        if self._berths:
            self._send(job)
        else:
            self._waiting.append(job)
        return job

    def _send(self, job: Job) -> None:
        berth = self._moored[job.job_id] = self._berths.pop()
        self.pump.fetch(job.job_id, job.key, berth.offset, ItemShape(1, berth.nbytes))

    def _fetched(self, job: Job, end: JobEnd) -> None:
        berth = self._moored.pop(job.job_id, None)
        if berth is None:  # the fetch was never sent
            self._arrived(job, None)
            return
        entry = self._entry_for(job) if end.outcome.is_success else None
        if entry is None:
            self._leave(job, berth, None)
            return
        self._unloading.add(job.key)
        source = self._bytes_at(Span(berth.offset, entry.nbytes))
        copying = in_thread(partial(self._bytes_at(entry.span).copy_, source))
        copying.add_done_callback(partial(self._brought_in, job, berth, entry))
        self.pump.start(copying)

    def _entry_for(self, job: Job) -> Entry | None:
        """A place for the object that has arrived; None if its length is wrong or without room."""
        assert job.nbytes is not None
        if self.pump.is_closing:
            return None
        if (job.nbytes - HEADER_BYTES) % self._rows.row_bytes:
            # The digest is right, but no store of this namespace writes objects of this length.
            self.counters["fetch_corrupt_rows"] += 1
            self.ledger.index.note_absent(job.key, time.monotonic())
            return None
        self.counters["fetch_bytes"] += job.nbytes
        entry = self.ledger.reserve(job.key, job.nbytes)
        if entry is None:
            self.counters["fetches_without_room"] += 1
        return entry

    def _brought_in(
        self, job: Job, berth: Span, entry: Entry, copying: asyncio.Future[torch.Tensor]
    ) -> None:
        self._unloading.remove(job.key)
        if succeeded(copying):
            self.ledger.table.commit(entry, dirty=False)
            self._leave(job, berth, entry)
        else:
            self.ledger.table.abandon(entry)
            self._leave(job, berth, None)

    def _leave(self, job: Job, berth: Span, entry: Entry | None) -> None:
        """End a fetch, and give its berth to the next one."""
        self._berths.append(berth)
        self._arrived(job, entry)
        while self._waiting and self._berths:
            waiting = self._waiting.popleft()
            if self.pump.is_closing or self.ledger.breaker.is_open(time.monotonic()):
                self._end(JobEnd(waiting.job_id, JobKind.FETCH, Outcome.CANCELLED))
            else:
                self._send(waiting)

    # --- uploads ---------------------------------------------------------------------------

    def _save_again(self, key: ChunkKey) -> None:
        """Upload a tensor that is neither known to be in the bucket nor on its way there."""
        known = key in self.ledger.unsaved or self.ledger.index.is_present(key)
        if self._place(key).state is EntryState.CLEAN and not known:
            self.ledger.plan_upload(key)
            self._order_uploads()

    def _on_done(self, end: JobEnd) -> None:
        if end.kind is JobKind.UPLOAD:
            self.counters["upload_bytes"] += end.nbytes
        super()._on_done(end)

    # --- places ----------------------------------------------------------------------------

    def _place(self, key: ChunkKey) -> Entry:
        entry = self.ledger.table.lookup(key)
        assert entry is not None, f"{key} has no place"
        return entry

    def _shape(self, entry: Entry) -> ItemShape:
        return ItemShape(1, entry.nbytes)

    def _bytes_at(self, span: Span) -> torch.Tensor:
        view = self.slab.view[span.offset : span.offset + span.nbytes]
        return torch.frombuffer(view, dtype=torch.uint8)

    def _tensor_at(self, entry: Entry) -> torch.Tensor:
        """A view of an entry's payload as a tensor of rows."""
        payload = self._bytes_at(entry.span)[HEADER_BYTES:]
        return payload.view(self._rows.dtype).view(-1, *self._rows.shape)
