"""Scheduler side of the EC connector: the planner, and a slab and an I/O process for items.

It runs in the engine-core process, on the engine's thread. It orders the fetches itself, because
vLLM's first-generation model runner does not call the workers' EC connector in steps that compute
no token, and there may be only such steps while a request waits for an image.
"""

from __future__ import annotations

import logging
import secrets
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakSet

from s3kv.config import Config
from s3kv.connectors.ec_translate import ItemWorkerReport, item_dtype, wanted, worker_rendezvous
from s3kv.connectors.guard import Guarded, guarded, wait_for_bucket
from s3kv.connectors.kv_translate import WorkerHandshake
from s3kv.connectors.linger import Linger, is_in_lockstep
from s3kv.connectors.log import EncoderTraffic, start_line
from s3kv.connectors.media import MediaDigests
from s3kv.connectors.metrics import S3ECStats, Values
from s3kv.connectors.request_params import params_of, read_limits
from s3kv.connectors.telemetry import EC_SHARES, Telemetry, host_gauges
from s3kv.errors import UnsupportedError
from s3kv.host.room import Extents
from s3kv.host.slab import Slab
from s3kv.host.table import Table
from s3kv.io.slab_handover import offer_slab
from s3kv.io.tier import Tier, open_tier
from s3kv.io.wire import START_TIMEOUT_S, Handshake
from s3kv.messages import ItemLoad, ItemPlan, JobKind
from s3kv.metrics import EC_METRICS
from s3kv.objects.headers import read_header
from s3kv.objects.integrity import Integrity
from s3kv.objects.item_format import HEADER_BYTES, SHARD
from s3kv.planning.breaker import Breaker
from s3kv.planning.ec import ECPlanner, ECPlannerSettings
from s3kv.planning.index import BucketIndex
from s3kv.planning.items import EncodingPace, Wanted
from s3kv.planning.ledger import Ledger
from s3kv.planning.requests import RequestLimits
from s3kv.types import ItemShape, Span

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ECConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger("s3kv")

_INDEX_ITEMS = 500_000
_ENCODE_ROWS_PER_S = 4_000.0
"""Speed of the encoder before its first measured output, which replaces it."""
_LINGER_S = 0.001
_POLL_AFTER_S = 1.0
"""Longest time between two polls of an idle I/O process."""
_SIDES: WeakSet[ECSchedulerSide] = WeakSet()


@dataclass(slots=True)
class _MediaRequest:
    """A request with media. items: the item of each feature; None for one that is not cached.
    limits: the request's token limits, which also apply to media. computed_tokens: value in the
    last pass. settled: later passes may skip the request, unless it has lost tokens."""

    items: list[Wanted | None]
    limits: RequestLimits
    computed_tokens: int = -1
    settled: bool = False


def reset_items() -> None:
    """Make the encoder outputs of all EC connectors in this process unreachable. vLLM reports
    changed weights only to its KV connector, which calls this."""
    for side in [*_SIDES]:
        side.reset()


class ECSchedulerSide(Guarded):
    """Scheduler side of one engine. Raises `UnsupportedError`, `ConfigError` or a `StoreError` at
    start, nothing afterwards."""

    def __init__(
        self, config: Config, vllm_config: VllmConfig, *, may_load: bool, may_save: bool
    ) -> None:
        self._config, self._vllm_config = config, vllm_config
        self._dtype = item_dtype(vllm_config)
        self._digests = MediaDigests()
        lora = vllm_config.lora_config
        self._adapts_towers = lora is not None and bool(lora.enable_tower_connector_lora)
        if self._adapts_towers:
            logger.info(
                "s3kv does not cache encoder outputs of requests with an adapter (LoRA), because "
                "adapters change the encoder (enable_tower_connector_lora): an EC connector "
                "cannot know which parts of an adapter the workers have loaded"
            )
        self._telemetry = Telemetry(EC_METRICS, EC_SHARES, EncoderTraffic())
        self._tier: Tier | None = None
        self._requests: dict[str, _MediaRequest] = {}
        self._salt = b""
        """Salt of the items' hashes since the last reset."""
        self._promised: dict[str, ItemLoad] = {}
        self._due: dict[str, ItemLoad] = {}
        self._has_polled = False
        self._linger = Linger(_LINGER_S, in_lockstep=is_in_lockstep(vllm_config))
        self._polled_s = 0.0
        if may_load:
            self._start(may_save)
        self.planner = self._make_planner(may_load, may_save)
        _SIDES.add(self)

    def _start(self, may_save: bool) -> None:
        wait = partial(wait_for_bucket, config=self._config)
        # No node is preferred: workers on several nodes may load from this slab.
        self._tier = tier = open_tier(self._config.host_bytes, self._introduce, wait=wait)
        digest, nbytes = tier.handshake.namespace_digest, tier.slab.nbytes
        slab = WorkerHandshake(digest, 1, nbytes, known=tier.known)
        logger.log(*start_line(self._config, [slab], may_load=True, may_save=may_save))

    def _introduce(self, slab: Slab) -> Handshake:
        """Hand the slab to the workers, which answer with the digest of the namespace."""
        tp = self._vllm_config.parallel_config.tensor_parallel_size
        names = [worker_rendezvous(self._vllm_config, rank) for rank in range(tp)]
        words = set(offer_slab(names, slab, START_TIMEOUT_S))
        if len(words) != 1:
            raise UnsupportedError(f"the ranks disagree on the namespace: {sorted(words)}")
        config, dtype, word = self._config, self._dtype, words.pop().decode("ascii")
        mode = Integrity.of(config)
        return Handshake(config, config.prefix, word, SHARD, {}, item_dtype=dtype, integrity=mode)

    def _make_planner(self, may_load: bool, may_save: bool) -> ECPlanner:
        config, vllm_config = self._config, self._vllm_config
        settings = ECPlannerSettings(
            dtype=self._dtype,
            # That of the model's embeddings; the encoder's may be a multiple.
            width=int(vllm_config.model_config.get_inputs_embeds_size()),
            max_wait_s=config.max_wait_ms / 1000,
            # Doubled: an encoder-only instance's output waits for no device. Its step does, but
            # only until the device has begun the step `max_concurrent_batches` earlier.
            steps_inflight=1 + 2 * int(vllm_config.max_concurrent_batches),
            may_load=may_load,
            may_save=may_save,
        )
        ledger = Ledger(
            Table(Extents.of(config.host_bytes if may_load else 0)),
            BucketIndex(capacity=_INDEX_ITEMS),
            Breaker(has_disk=config.disk_path is not None),
            world_size=1,
            may_save=may_save,
        )
        return ECPlanner(ledger, EncodingPace(encode_rows_per_s=_ENCODE_ROWS_PER_S), settings)

    def shutdown(self) -> None:
        """Close the I/O process and the slab, which workers keep mapped. Idempotent."""
        if self._tier is not None:
            self._tier.close()

    @guarded(default=lambda: True)
    def ensure(self, request: Request, computed_tokens: int) -> bool:
        """Whether a request with items may be scheduled now. Called in every pass."""
        known = self._request(request)
        if known.settled and computed_tokens >= known.computed_tokens:
            return True
        self._poll_once()
        now_s = time.monotonic()
        if known.computed_tokens == computed_tokens:
            known.settled = not self.planner.waits(request.request_id, now_s)
            return known.settled
        known.computed_tokens = computed_tokens
        needed = [
            item
            for item, feature in zip(known.items, request.mm_features, strict=True)
            if item is not None
            and known.limits.load_tokens != 0
            and feature.mm_position.offset + feature.mm_position.length > computed_tokens
        ]
        known.settled = self.planner.ensure(request.request_id, needed, now_s)
        return known.settled

    def _request(self, request: Request) -> _MediaRequest:
        known = self._requests.get(request.request_id)
        if known is None or len(known.items) != len(request.mm_features):
            items = [self._item(request, n) for n in range(len(request.mm_features))]
            # The KV connector logs what is wrong with them.
            limits = read_limits(params_of(request))
            known = self._requests[request.request_id] = _MediaRequest(items, limits)
            names = (feature.identifier for feature in request.mm_features)
            self.planner.meet(request.request_id, zip(names, items, strict=True))
        return known

    def _item(self, request: Request, index: int) -> Wanted | None:
        if self._adapts_towers and request.lora_request is not None:
            return None
        trusts = self._config.trust_media_names
        item = wanted(request, index, self._digests, self._salt, trust_media_names=trusts)
        if item is None:
            self.planner.counters["items_untrusted"] += 1
        return item

    def has(self, identifier: str) -> bool:
        if (load := self._promise(identifier)) is not None:
            self._promised[identifier] = load
        return load is not None or identifier in self._due

    @guarded(default=lambda: None)
    def _promise(self, identifier: str) -> ItemLoad | None:
        return self.planner.promise(identifier)

    def allocated(self, request: Request, index: int) -> None:
        """Note that the engine has made room for an item. A promised item is loaded even if the
        planner has failed, because the engine dies without it."""
        identifier = request.mm_features[index].identifier
        if identifier in self._promised:
            self._due[identifier] = self._promised[identifier]
        self._allocated(request, index)

    @guarded(default=lambda: None)
    def _allocated(self, request: Request, index: int) -> None:
        known = self._request(request)
        item, most = known.items[index], known.limits.save_tokens
        if item is not None:
            place = request.mm_features[index].mm_position
            saves = most is None or place.offset + place.length <= most
            self.planner.allocated(request.request_id, item, time.monotonic(), saves=saves)

    def plan(self, output: SchedulerOutput) -> ItemPlan:
        """End the pass. Returns its plan; if the planner has failed, only the promised loads."""
        plan = self._plan(output)
        due, self._due = self._due, {}
        self._promised.clear()
        return plan if plan is not None else ItemPlan(loads=tuple(due.values()))

    @guarded(default=lambda: None)
    def _plan(self, output: SchedulerOutput) -> ItemPlan | None:
        plan = self.planner.plan(output.free_encoder_mm_hashes)
        self._order()
        self._has_polled = False
        ledger = self.planner.ledger
        if pause_s := self._linger.pause_s(output, lambda: ledger.fetches_inflight > 0):
            self._poll(pause_s)
        self._telemetry.log(ledger, time.monotonic())
        return plan

    @guarded(default=lambda: None)
    def on_output(self, output: ECConnectorOutput) -> None:
        report = output.ec_connector_worker_meta
        if isinstance(report, ItemWorkerReport):
            self.planner.on_report(report.report, time.monotonic())
            self._telemetry.add_seconds(report.report.seconds)

    @guarded(default=lambda: None)
    def on_finished(self, request: Request) -> None:
        self._requests.pop(request.request_id, None)
        self._telemetry.is_stale = True
        self.planner.finished(request.request_id)
        self._order()
        self._telemetry.log(self.planner.ledger, time.monotonic(), finished=True)

    @guarded(default=lambda: None)
    def reset(self) -> None:
        """Make all earlier items unreachable. Between two scheduling passes."""
        self._salt = secrets.token_bytes(32)
        for known in self._requests.values():
            known.items = [None] * len(known.items)
        self.planner.reset()

    def stats(self) -> S3ECStats | None:
        io_counters = () if self._tier is None else (self._tier.client.counters,)
        values = self._telemetry.take(self._read_gauges, self.planner.counters, *io_counters)
        return S3ECStats(data=values) if values else None

    def on_broken(self) -> None:
        self.planner.counters["internal_errors"] += 1

    @guarded(default=dict)
    def _read_gauges(self) -> Values:
        ledger = self.planner.ledger
        return host_gauges(ledger, ledger.table.statistics().unit_bytes)

    def _order(self) -> None:
        """Send the planner's jobs. Called once per pass, at its end, because waking the I/O
        process costs more than everything else in the pass."""
        if self._tier is None:
            return
        client = self._tier.client
        for fetch in self.planner.take_fetches():
            client.submit(fetch)
        for job_id in self.planner.take_cancels():
            client.cancel(job_id)
        for job in self.planner.ledger.plan_due(time.monotonic()):
            is_upload = job.kind is JobKind.UPLOAD
            shape = _shape_of(job.entry.span, self._tier.slab) if is_upload else None
            client.submit(job.for_bucket(shape))
        client.flush()

    def _poll_once(self) -> None:
        """Poll the I/O process, once per pass, if it may have sent something."""
        if self._has_polled:
            return
        self._has_polled = True
        is_due = time.monotonic() > self._polled_s + _POLL_AFTER_S
        if is_due or self.planner.ledger.fetches_inflight:
            self._poll(0.0)

    def _poll(self, linger_s: float) -> None:
        self._has_polled = True
        if self._tier is None:
            return
        ended = self._tier.client.poll(linger_s)
        self._polled_s = now_s = time.monotonic()
        for done in ended:
            if done.reason:
                self.planner.counters[f"fetch_corrupt_{done.reason}"] += 1
            if done.outcome.is_success and done.kind is JobKind.FETCH:
                self._telemetry.add_seconds({"fetch_seconds": [done.seconds]})
            self.planner.on_end(done, now_s)


def _shape_of(span: Span, slab: Slab) -> ItemShape:
    """The shape of an item in the slab, from its verified header."""
    header = slab.view[span.offset : span.offset + HEADER_BYTES]
    (tensor,) = read_header(header, object_bytes=span.nbytes).tensors
    return ItemShape(tensor.shape[0], span.nbytes)
