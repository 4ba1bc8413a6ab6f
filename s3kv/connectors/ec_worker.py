"""The worker's side of the EC connector: loads from the scheduler's slab, saves to its own outbox.

It runs in each worker process, on the thread that runs the model. Only the first pipeline stage has
an encoder cache. All its ranks load. Only one of them saves, because all have the same outputs.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import MutableMapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from s3kv.config import Config
from s3kv.connectors.ec_translate import ItemWorkerReport, item_dtype, worker_rendezvous
from s3kv.connectors.guard import Guarded, guarded, wait_for_bucket
from s3kv.connectors.identity import encoder_fingerprint
from s3kv.connectors.log import leave_to_first_rank, warn_of_uploads_left
from s3kv.connectors.worker_memory import open_worker_tier
from s3kv.device.item_copies import ItemCopies, item_copies
from s3kv.errors import ConfigError
from s3kv.host.slab import Slab
from s3kv.io.slab_handover import SlabTaker
from s3kv.io.tier import introduce
from s3kv.io.wire import Handshake
from s3kv.messages import ItemLoad, ItemPlan, ItemReport, ItemSave
from s3kv.objects.item_format import HEADER_BYTES, MAX_ITEM_BYTES, SHARD, object_bytes
from s3kv.types import ItemShape
from s3kv.worker.outbox import Outbox

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class ECWorkerSide(Guarded):
    """The worker's side of one rank. Raises `ConfigError` or a `StoreError` at start. Afterwards it
    raises only if it cannot carry out a promised load, because vLLM then lacks that item."""

    def __init__(
        self, config: Config, vllm_config: VllmConfig, *, may_load: bool, may_save: bool
    ) -> None:
        from vllm.distributed.parallel_state import get_pp_group, get_tp_group

        self._config = config
        self._dtype_name = item_dtype(vllm_config)
        self._dtype: torch.dtype = vllm_config.model_config.dtype
        self._report = ItemReport(Counter())
        """The increments since the last report."""
        self._loads: tuple[ItemLoad, ...] = ()
        self._saves: dict[str, ItemSave] = {}
        self._encoder_started: Any = None
        """The time at which the encoder may start."""
        self._encoder_stopped: Any = None
        self._cache: MutableMapping[str, torch.Tensor] = {}
        """The engine's encoder cache, in an engine that loads."""
        self._counted: set[str] = set()
        """Its items that were there before the encoder ran, or have been counted since."""
        self._rows = 0
        """Rows that the encoder has computed in this step."""
        self._timed: deque[tuple[Any, Any, int]] = deque()
        """Start and end of loads and encoder runs, in order, until the device has reached both.
        The number is the rows that the encoder computed; 0 for a load."""
        self._loads_from: Slab | None = None
        self._outbox: Outbox | None = None
        self._taker: SlabTaker | None = None
        kind = vllm_config.device_config.device_type
        self._device = torch.device(kind, torch.cuda.current_device() if kind == "cuda" else 0)
        self._copies: ItemCopies = item_copies(self._dtype, self._device)
        tp_rank = get_tp_group().rank_in_group
        self.counts = tp_rank == 0 and get_pp_group().is_first_rank
        """Whether this rank saves, measures and reports."""
        if not get_pp_group().is_first_rank:
            return
        leave_to_first_rank(tp_rank)
        identity = encoder_fingerprint(config, vllm_config)
        handshake = introduce(config, identity, SHARD, item_dtype=self._dtype_name)
        if may_save and self.counts:
            self._outbox = self._open_outbox(handshake, vllm_config)
        if may_load:
            self._taker = self._listen(vllm_config, tp_rank, handshake.namespace_digest)

    def _listen(self, vllm_config: VllmConfig, tp_rank: int, digest: str) -> SlabTaker:
        try:
            name = worker_rendezvous(vllm_config, tp_rank)
            return SlabTaker(name, self._take, digest.encode("ascii"))
        except OSError as error:
            engine_id = vllm_config.ec_transfer_config.engine_id
            raise ConfigError(
                f"engine_id is {engine_id!r}, and another engine on this machine has the same "
                f"({error}): leave it out of ec_transfer_config, or give each engine its own"
            ) from error

    def _open_outbox(self, handshake: Handshake, vllm_config: VllmConfig) -> Outbox:
        nbytes, wait = self._config.staging_bytes, partial(wait_for_bucket, config=self._config)
        tier = open_worker_tier(vllm_config, nbytes, handshake, self._device, wait=wait)
        try:
            self._copies.attach(tier.slab.view)
        except BaseException:
            tier.close()
            raise
        return Outbox(tier.client, tier.slab, time.monotonic)

    def _take(self, slab: Slab) -> None:
        """Accept the scheduler's slab. Runs on the taker's thread, during the engine's start."""
        slab.ask_for_huge_pages()
        self._copies.attach(slab.view)
        self._loads_from = slab

    def shutdown(self) -> None:
        """Finish uploads within `drain_timeout_s`, then release everything. Idempotent."""
        outbox, self._outbox = self._outbox, None
        if outbox is not None:
            timeout_s = self._config.drain_timeout_s
            warn_of_uploads_left(outbox.close(timeout_s), "encoder output", timeout_s)
        self._copies.close()  # Raises if the device has failed. Keeps both slabs mapped until now.
        taker, self._taker = self._taker, None
        if taker is not None:
            self._loads_from = None
            taker.close()

    def begin(self, plan: ItemPlan) -> None:
        self._loads, self._saves = plan.loads, {save.identifier: save for save in plan.saves}
        self._encoder_started = self._moment()

    def load(self, cache: MutableMapping[str, torch.Tensor]) -> None:
        """Carry out the plan's loads to the engine's encoder cache. Raises `RuntimeError` if an
        item cannot be copied."""
        for load in self._loads:
            if self._loads_from is None:
                raise RuntimeError(
                    f"s3kv: {load.identifier} was promised without a slab to load it from. This "
                    "is a bug of s3kv: please report it"
                )
            payload = self._loads_from.view[load.offset + HEADER_BYTES : load.offset + load.nbytes]
            started = self._moment()
            cache[load.identifier] = self._copies.load(payload, load.rows, load.width)
            self._note_load(len(payload), started)
        if self._loads:
            self._encoder_started = self._moment()
        self._cache, self._counted = cache, set(cache)

    @guarded(default=lambda: None)
    def _moment(self) -> Any:
        return self._copies.now() if self.counts else None

    @guarded(default=lambda: None)
    def _note_load(self, nbytes: int, started: Any) -> None:
        if started is not None:
            self._report.counters["load_ok"] += 1
            self._report.counters["load_bytes"] += nbytes
            self._timed.append((started, self._copies.now(), 0))

    @guarded(default=lambda: None)
    def save(self, cache: MutableMapping[str, torch.Tensor], identifier: str) -> None:
        """Count an item that the encoder has just computed. Save it if the plan orders that."""
        if not self.counts:
            return
        self._counted.add(identifier)
        tensor = cache[identifier]
        if not self._rows:
            self._encoder_stopped = self._copies.now()
        self._rows += len(tensor)
        self._report.counters["encoded"] += 1
        self._report.counters["encoded_rows"] += len(tensor)
        order = self._saves.pop(identifier, None)
        if order is not None and self._outbox is not None:
            self._send(self._outbox, order, tensor)

    def _send(self, outbox: Outbox, order: ItemSave, tensor: torch.Tensor) -> None:
        if tensor.ndim != 2 or len(tensor) != order.rows or tensor.dtype is not self._dtype:
            self._report.counters["saves_unfit"] += 1
            return
        nbytes = object_bytes(self._dtype_name, order.rows, tensor.shape[1])
        if nbytes > MAX_ITEM_BYTES:
            self._report.counters["items_too_large"] += 1
            return
        self._report.merge(outbox.take_ends())  # frees places
        span = outbox.place(nbytes)
        if span is None:
            self._report.counters["saves_dropped"] += 1
            return
        payload = outbox.view[span.offset + HEADER_BYTES : span.offset + nbytes]
        copy = self._copies.save(tensor, payload)
        outbox.send(order.key, span, ItemShape(order.rows, nbytes), copy)

    def report(self) -> ItemWorkerReport | None:
        """End the step. Returns the increments since the last report; None without any."""
        self._end_step()
        if self._report == ItemReport():
            return None
        report, self._report = self._report, ItemReport(Counter())
        return ItemWorkerReport(report)

    @guarded(default=lambda: None)
    def _end_step(self) -> None:
        # vLLM's second-generation model runner reports what it has encoded only to a producer.
        for identifier in self._cache.keys() - self._counted:
            self.save(self._cache, identifier)
        if self._rows:
            self._timed.append((self._encoder_started, self._encoder_stopped, self._rows))
            self._rows = 0
        self._measure()
        if self._outbox is not None:
            self._report.merge(self._outbox.take_ends())

    def _measure(self) -> None:
        """Report the times of loads and encoder runs that have ended on the device."""
        while self._timed:
            started, stopped, rows = self._timed[0]
            seconds = self._copies.seconds_between(started, stopped)
            if seconds is None:
                return
            self._timed.popleft()
            if rows:
                self._report.encoded_rows += rows
                self._report.encode_seconds += seconds
            else:
                self._report.seconds.setdefault("load_seconds", []).append(seconds)

    def on_broken(self) -> None:
        self._report = ItemReport(Counter(internal_errors=1))
