"""The scheduler's side of the EC connector: its own slab and I/O process, and the planner.

Lives in the engine-core process, on its one thread. Fetches are ordered from here, not from the
workers, because vLLM's first model runner calls no worker's EC connector in a step that computes
no token, and a request that waits for an image is just that.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from s3kv.config import Config
from s3kv.connectors.bucket import wait_for_bucket
from s3kv.connectors.ec_messages import ItemWorkerReport
from s3kv.connectors.ec_metrics import S3ECStats
from s3kv.connectors.ec_translate import (
    embedding_width,
    has_tower_lora,
    is_cacheable,
    item_dtype,
    steps_inflight,
    wanted,
    worker_rendezvous,
)
from s3kv.connectors.guard import Guarded, guarded
from s3kv.connectors.metrics import Gauges, Meter, Values, add, breaker_states, with_misses
from s3kv.connectors.requests import Adapters
from s3kv.errors import UnsupportedError
from s3kv.host.items import ItemTable
from s3kv.host.slab import Slab
from s3kv.io.client import IoClient
from s3kv.io.complaints import Complaints
from s3kv.io.handover import offer_slab
from s3kv.io.wire import Hello
from s3kv.messages import ItemLoad, ItemPlan
from s3kv.metrics import EC_METRICS
from s3kv.objects.integrity import Integrity
from s3kv.objects.items import SHARD
from s3kv.planning.breaker import Breaker
from s3kv.planning.ec import ECPlanner, ECPlannerSettings
from s3kv.planning.encoding import EncodingPace
from s3kv.planning.index import BucketIndex
from s3kv.planning.items import Wanted

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ECConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger("s3kv")

_INDEX_ITEMS = 500_000
_BREAKER_FAILURES = 5
_LINGER_S = 0.001
"""How long an engine that only waits for items may sleep, instead of spinning."""
_LOOK_AFTER_S = 1.0
"""How long the I/O process may go unheard while it has nothing to do."""


@dataclass(slots=True)
class _Asked:
    """A request in the engine's words. items: what its features need, None where that is not for
    the cache. computed_tokens: as of the last pass. settled: all its features need no more thought.
    """

    items: list[Wanted | None]
    computed_tokens: int = -1
    settled: bool = False


_SHARES = with_misses({"saves_dropped": (("saves_dropped|memory_full", 1),)})
_BREAKER = breaker_states(EC_METRICS)


class ECSchedulerSide(Guarded):
    """Raises `UnsupportedError`, `ConfigError` or a `StoreError` at start, nothing afterwards."""

    def __init__(
        self, config: Config, vllm_config: VllmConfig, *, may_load: bool, may_save: bool
    ) -> None:
        self._config = config
        self._vllm_config = vllm_config
        self._dtype = item_dtype(vllm_config)
        self._adapters = Adapters() if has_tower_lora(vllm_config) else None
        self._meter = Meter(EC_METRICS, _SHARES)
        self._io_meter = Meter(EC_METRICS)
        self._gauges = Gauges()
        self._stirred = True
        """Something happened since the gauges were last looked at."""
        self._seconds: Values = {}
        self._complaints = Complaints(time.monotonic)
        self._client: IoClient | None = None
        self._slab: Slab | None = None
        self._asked: dict[str, _Asked] = {}
        self._promised: dict[str, ItemLoad] = {}
        self._due: dict[str, ItemLoad] = {}
        self._heard = self._was_idle = False
        self._polled_s = 0.0
        if may_load:
            self._start()
        self.planner = self._make_planner(may_load, may_save)

    def _start(self) -> None:
        # Of no GPU's node: the workers that load from it may be on several.
        self._slab = Slab.create(self._config.host_bytes, huge_pages=self._config.huge_pages)
        try:
            digest = self._offer(self._slab)
            self._client = self._open_client(self._slab, digest)
        except BaseException:
            self._slab.close()
            raise
        logger.info(
            "s3kv: encoder outputs in bucket %s, namespace %s, %d bytes of host memory",
            self._config.bucket,
            digest,
            self._slab.nbytes,
        )

    def _offer(self, slab: Slab) -> str:
        """Give the slab to the workers; the digest of the namespace, which they know."""
        tp = self._vllm_config.parallel_config.tensor_parallel_size
        names = [worker_rendezvous(self._vllm_config, rank) for rank in range(tp)]
        words = set(offer_slab(names, slab, self._config.start_timeout_ms / 1000))
        if len(words) != 1:
            raise UnsupportedError(f"the ranks disagree on the namespace: {sorted(words)}")
        return words.pop().decode("ascii")

    def _open_client(self, slab: Slab, digest: str) -> IoClient:
        hello = Hello(
            self._config,
            self._config.prefix,
            digest,
            SHARD,
            {},
            item_dtype=self._dtype,
            integrity=Integrity.of(self._config),
        )
        client = IoClient(hello, slab)
        client.start()
        wait_for_bucket(client, self._config)
        return client

    def _make_planner(self, may_load: bool, may_save: bool) -> ECPlanner:
        config, vllm_config = self._config, self._vllm_config
        settings = ECPlannerSettings(
            dtype=self._dtype,
            width=embedding_width(vllm_config),
            max_wait_s=config.max_wait_ms / 1000,
            recompute_gate=config.recompute_gate,
            max_item_bytes=config.max_item_bytes,
            steps_inflight=steps_inflight(vllm_config),
            may_load=may_load,
            may_save=may_save,
        )
        return ECPlanner(
            ItemTable(config.host_bytes if may_load else 0, config.eviction),
            BucketIndex(capacity=_INDEX_ITEMS, miss_ttl_s=config.miss_ttl_s),
            Breaker(threshold=_BREAKER_FAILURES),
            EncodingPace(encode_rows_per_s=config.encode_tokens_per_s),
            settings,
            # What vLLM has measured, on a producer since 0.32.
            getattr(vllm_config.ec_transfer_config, "mm_encoder_output_widths", None),
        )

    def shutdown(self) -> None:
        """Idempotent. The workers keep their mapping of the slab as long as they live."""
        if self._client is not None:
            self._client.close()
        if self._slab is not None:
            self._slab.close()

    # --- hooks, in the order of a scheduling pass ------------------------------------------

    @guarded(default=lambda: True)
    def ensure(self, request: Request, computed_tokens: int) -> bool:
        """False: not yet. Called for every request with items, in every pass."""
        asked = self._asked_by(request)
        if asked.settled:
            return True
        self._hear()
        now_s = time.monotonic()
        if asked.computed_tokens == computed_tokens:
            asked.settled = not self.planner.waits(request.request_id, now_s)
            return asked.settled
        asked.computed_tokens = computed_tokens
        needed = [
            item
            for item, feature in zip(asked.items, request.mm_features, strict=True)
            if item is not None
            and feature.mm_position.offset + feature.mm_position.length > computed_tokens
        ]
        asked.settled = self.planner.ensure(request.request_id, needed, now_s)
        return asked.settled

    def _asked_by(self, request: Request) -> _Asked:
        asked = self._asked.get(request.request_id)
        if asked is None or len(asked.items) != len(request.mm_features):
            asked = _Asked([self._item(request, n) for n in range(len(request.mm_features))])
            self._asked[request.request_id] = asked
        return asked

    def _item(self, request: Request, index: int) -> Wanted | None:
        feature = request.mm_features[index]
        if is_cacheable(feature, trust_client_uuid=self._config.trust_client_uuid):
            return wanted(request, feature, self._adapters)
        self.planner.counters["items_untrusted"] += 1
        return None

    def has(self, identifier: str) -> bool:
        load = self._promise(identifier)
        if load is not None:
            self._promised[identifier] = load
        return identifier in self._promised

    @guarded(default=lambda: None)
    def _promise(self, identifier: str) -> ItemLoad | None:
        return self.planner.promise(identifier)

    def allocated(self, request: Request, index: int) -> None:
        """A promise is kept even if everything else in here fails: without it the engine dies."""
        identifier = request.mm_features[index].identifier
        if identifier in self._promised:
            self._due[identifier] = self._promised[identifier]
        self._allocated(request, index)

    @guarded(default=lambda: None)
    def _allocated(self, request: Request, index: int) -> None:
        item = self._asked_by(request).items[index]
        if item is not None:
            self.planner.allocated(request.request_id, item)

    def plan(self, output: SchedulerOutput) -> ItemPlan:
        """End of the pass."""
        plan = self._plan(output)
        due, self._due = self._due, {}
        self._promised.clear()
        return plan if plan is not None else ItemPlan(loads=tuple(due.values()))

    @guarded(default=lambda: None)
    def _plan(self, output: SchedulerOutput) -> ItemPlan | None:
        plan = self.planner.plan(output.free_encoder_mm_hashes)
        self._order()
        self._heard = False
        # Twice, because the step before may still be running when this one is planned.
        idle = output.total_num_scheduled_tokens == 0
        if idle and self._was_idle and self.planner.fetches_inflight:
            self._poll(_LINGER_S)
        self._was_idle = idle
        return plan

    @guarded(default=lambda: None)
    def on_output(self, output: ECConnectorOutput) -> None:
        report = getattr(output, "ec_connector_worker_meta", None)
        if isinstance(report, ItemWorkerReport):
            self.planner.on_report(report.report)
            add(self._seconds, report.report.seconds, EC_METRICS)

    @guarded(default=lambda: None)
    def on_finished(self, request: Request) -> None:
        self._asked.pop(request.request_id, None)
        self._stirred = True
        self.planner.finished(request.request_id)
        self._order()

    def stats(self) -> S3ECStats | None:
        self.planner.counters["evictions"] = self.planner.table.evictions
        values = self._meter.grown(self.planner.counters)
        if self._client is not None:
            add(values, self._io_meter.grown(self._client.counters), EC_METRICS)
        seconds, self._seconds = self._seconds, {}
        values |= seconds
        if values or self._stirred:
            values |= self._changed_gauges()
        return S3ECStats(data=values) if values else None

    def on_broken(self) -> None:
        self.planner.counters["internal_errors"] += 1

    @guarded(default=dict)
    def _changed_gauges(self) -> Values:
        self._stirred = False
        held = self.planner.table.statistics()
        return self._gauges.changed(
            {
                "slab_bytes|free": held.free_bytes,
                "slab_bytes|filling": held.filling_bytes,
                "slab_bytes|clean": held.resident_bytes,
                "slab_pinned_bytes": held.pinned_bytes,
                **_BREAKER[self.planner.breaker.state.value],
            }
        )

    # --- the I/O process -------------------------------------------------------------------

    def _order(self) -> None:
        """Not before the end of the pass: to wake the I/O process costs more than all the rest."""
        if self._client is None:
            return
        for order in self.planner.take_fetches():
            self._client.fetch(order.job_id, order.key, order.offset, order.shape)
        for job_id in self.planner.take_cancels():
            self._client.cancel(job_id)
        self._client.flush()

    def _hear(self) -> None:
        """Once a pass, if there can be news."""
        if self._heard:
            return
        self._heard = True
        if self.planner.fetches_inflight or time.monotonic() > self._polled_s + _LOOK_AFTER_S:
            self._poll(0.0)

    def _poll(self, linger_s: float) -> None:
        self._heard = True
        if self._client is None:
            return
        ended = self._client.poll(linger_s)
        self._polled_s = now_s = time.monotonic()
        for done in ended:
            if done.reason:
                self.planner.counters[f"fetch_corrupt_{done.reason}"] += 1
            if done.outcome.is_success:
                self._seconds.setdefault("fetch_seconds", []).append(done.seconds)
            self.planner.ended(done.job_id, done.outcome, done.nbytes, done.seconds, now_s)
            self._complaints.note("fetch", done.outcome, done.detail)
