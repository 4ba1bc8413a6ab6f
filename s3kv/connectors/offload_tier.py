"""S3Tier: a secondary tier of vLLM's `OffloadingConnector` (0.31 to 0.33) in a bucket.

    {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {
        "cpu_bytes_to_use": 68719476736,
        "spec_name": "TieringOffloadingSpec",
        "secondary_tiers": [{"type": "s3kv", "bucket": "my-bucket"}]}}

vLLM copies between the GPU and its primary tier, host memory divided into rows. This tier moves
rows to and from the bucket: the I/O process maps the primary tier's file, so bytes go from a socket
to a row. Decisions are the planner's (`planning.offload`); this module translates.

It refuses engines whose keys leave out an input of the model (`tier_setup`).

It runs in vLLM's scheduler process, under vLLM's manager lock: one caller at a time, any thread.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingEvent,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingMetricMetadata,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from s3kv.connectors.ec_scheduler import reset_items
from s3kv.connectors.guard import Guarded, guarded, wait_for_bucket
from s3kv.connectors.identity import offload_fingerprint
from s3kv.connectors.kv_translate import WorkerHandshake
from s3kv.connectors.linger import LINGER_S, is_in_lockstep
from s3kv.connectors.log import TierTraffic, join_vllm_log, start_line, warn_of_uploads_left
from s3kv.connectors.metrics import Values
from s3kv.connectors.request_params import read_limits
from s3kv.connectors.telemetry import TIER_SHARES, Telemetry
from s3kv.connectors.tier_setup import (
    check_requests_are_known,
    check_rows_are_whole,
    engine_config,
    parse_settings,
    row_eraser,
    row_tensor,
)
from s3kv.host.slab import Slab
from s3kv.io.tier import introduce, open_tier
from s3kv.io.wire import Handshake
from s3kv.messages import BucketJob, JobKind
from s3kv.metrics import NAMESPACE, TIER_METRICS, labels_of, name_of
from s3kv.objects.shards import Shard
from s3kv.planning.breaker import Breaker, BreakerState
from s3kv.planning.index import BucketIndex
from s3kv.planning.lookup import salted
from s3kv.planning.offload import OffloadAnswer, OffloadPlanner
from s3kv.planning.pace import Pace
from s3kv.planning.requests import RequestLimits
from s3kv.planning.row_transfers import RowKey, TransferEnd
from s3kv.types import ChunkKey

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec, OffloadKey, ReqContext, ScheduleEndContext
    from vllm.v1.kv_offload.tiering.base import TransferJob

logger = logging.getLogger("s3kv")

WHOLE = Shard(range(1), 1, range(1), 1).name
"""The shard of a row, which holds the KV of all ranks."""
_SETTLE_S = 5.0
"""Time for uploads to end at a reset. vLLM's engine waits meanwhile."""
_RESULTS = {answer: LookupResult[answer.name] for answer in OffloadAnswer}


class S3Tier(Guarded, SecondaryTierManager):
    """The tier. Its settings are those of `s3kv.config`, except `tier_setup.REPLACED`.

    Raises `ValueError`, `UnsupportedError` or a `StoreError` at start; nothing afterwards.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        locality: str = "REMOTE",
        **settings: Any,
    ) -> None:
        """locality: of the bucket, for vLLM's events and the filters of requests."""
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = Locality(locality)
        join_vllm_log()
        self._config = config = parse_settings(settings)
        vllm_config, kv_cache_config = engine_config()
        check_requests_are_known(config, vllm_config, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._may_load, self._may_save = transfer.is_kv_consumer, transfer.is_kv_producer
        rows, row_bytes = primary_kv_view.shape or (0, 0)
        offloading = offloading_spec.config
        blocks = offloading.cache.blocks_per_chunk
        check_rows_are_whole(blocks, kv_cache_config)
        self._erase = row_eraser(offloading_spec, kv_cache_config, primary_kv_view)
        self.planner = OffloadPlanner(
            BucketIndex(),
            Breaker(has_disk=config.disk_path is not None),
            Pace(fetches_at_once=config.fetches_at_once(row_bytes)),
            rows=rows,
            chunk_tokens=blocks * max(group.tokens_per_block for group in offloading.groups),
            groups=len(offloading.groups),
            max_wait_s=config.max_wait_ms / 1000,
            is_observed=offloading_spec.kv_events_config.enable_kv_cache_events,
        )
        self._telemetry = Telemetry(TIER_METRICS, TIER_SHARES, TierTraffic())
        plain = ((name, metric) for name, metric in TIER_METRICS.items() if not metric.buckets)
        self._first: Values = {key: 0 for name, metric in plain for key in metric.keys(name)}
        """Zeros for the first report: Prometheus misses the growth of a series from above 0."""
        self._open: set[int] = set()  # vLLM's jobs that have not been reported
        self._now_s = time.monotonic()
        """Time of the last new request or poll. vLLM polls before the lookups of a pass."""
        self._linger_s = 0.0 if is_in_lockstep(vllm_config) else LINGER_S
        self._salt = b""  # of the hashes, since the last reset
        handshake = introduce(
            config,
            offload_fingerprint(config, vllm_config, offloading, row_bytes),
            WHOLE,
            dict.fromkeys(range(len(offloading.groups)), (row_tensor(vllm_config, row_bytes),)),
            shapes=(WHOLE,),
            row_bytes=row_bytes,
        )
        self._open_tier(handshake, primary_kv_view)

    def _open_tier(self, handshake: Handshake, view: memoryview) -> None:
        wait = partial(wait_for_bucket, config=self._config)
        self._tier = tier = open_tier(Slab.behind(view), handshake, wait=wait)
        rows = WorkerHandshake(handshake.namespace_digest, 1, view.nbytes, known=tier.known)
        loads, saves, content = self._may_load, self._may_save, "rows of vLLM's offloading"
        line = start_line(self._config, [rows], may_load=loads, may_save=saves, content=content)
        logger.log(*line)

    @guarded(default=RequestOffloadingContext)
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._now_s = time.monotonic()
        request_id = req_context.req_id
        limits = read_limits(req_context.kv_transfer_params, request_id, self.planner.counters)
        loads = limits.load_tokens if self._may_load else 0
        saves = limits.save_tokens if self._may_save else 0
        self.planner.begin(request_id, RequestLimits(saves, loads))
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        # vLLM looks up every chunk of a prompt that has begun to wait.
        retries = self.planner.retries
        if req_context.req_id in retries and self.broken is None:
            retries[req_context.req_id] += 1
            return LookupResult.RETRY
        return self._look_up(key, req_context)

    @guarded(default=lambda: LookupResult.MISS)
    def _look_up(self, key: OffloadKey, context: ReqContext) -> LookupResult:
        chunk, end_token = self._chunk(key), context.get_offload_key_position(key)
        return _RESULTS[self.planner.lookup(context.req_id, chunk, end_token, self._now_s)]

    @guarded(default=lambda: None)
    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        now_s = time.monotonic()
        for key in keys:
            self.planner.use(RowKey(key, self._chunk(key)), now_s)

    @guarded(default=lambda: None)
    def on_request_finished(self, req_context: ReqContext) -> None:
        # vLLM itself reports no use of the chunks that its own caches serve.
        self.touch(getattr(req_context, "_offload_key_positions", ()), req_context)
        self.planner.finish(req_context.req_id)
        self._telemetry.log(self.planner, time.monotonic(), finished=True)

    @guarded(default=lambda: None)
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        now_s = time.monotonic()
        self.planner.end_pass(context.new_req_ids, now_s)
        self._send(self.planner.uses())
        self._cancel()
        if self.planner.is_idle:
            self._poll(self._linger_s)
        self._tier.client.flush()
        self._telemetry.log(self.planner, now_s)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._open.add(job_metadata.job_id)
        self._begin(job_metadata)

    submit_store = submit_load

    @guarded(default=lambda: None)
    def _begin(self, job: TransferJob) -> None:
        begin = self.planner.load if job.is_promotion else self.planner.store
        self._send(begin(job.job_id, job.req_context.req_id, self._rows(job), time.monotonic()))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        ends: Sequence[TransferEnd] = self._ended()
        if self.broken is not None:  # nothing touches the rows any more
            ends = [TransferEnd(job_id, False, (), 0.0, 0) for job_id in self._open]
        self._open.difference_update(end.transfer_id for end in ends)
        return [
            JobResult(number, is_whole, None if is_whole else succeeded, seconds, nbytes)
            for number, is_whole, succeeded, seconds, nbytes in ends
        ]

    @guarded(default=list)
    def _ended(self) -> list[TransferEnd]:
        self._poll()
        return self.planner.transfers.take_ends()

    def _poll(self, linger_s: float = 0.0) -> None:
        ends = self._tier.client.poll(linger_s)
        self._now_s = now_s = time.monotonic()
        for end in ends:
            if end.kind in (JobKind.FETCH, JobKind.UPLOAD) and end.outcome.is_success:
                self._telemetry.add_seconds({f"{end.kind.value}_seconds": [end.seconds]})
            self.planner.on_end(end, now_s)

    def drain_jobs(self) -> None:
        """Wait until nothing touches the rows: uploads get a few seconds, fetches none. Then the
        I/O process is killed. vLLM calls this before it resets its cache, also after a change of
        weights. So earlier chunks become unreachable, as after the connector's reset."""
        reset_items()
        self._drain_jobs()

    @guarded(default=lambda: None)
    def _drain_jobs(self) -> None:
        self.planner.reset()
        self._cancel()
        self._tier.client.settle(_SETTLE_S)
        self._poll()
        self.planner.changes.clear()  # their keys lack the new salt
        self._salt = secrets.token_bytes(32)
        logger.info("s3kv: cache reset; earlier chunks are unreachable now")

    def shutdown(self) -> None:
        """Finish uploads within `drain_timeout_s`, then end the I/O process. Idempotent."""
        timeout_s = self._config.drain_timeout_s
        warn_of_uploads_left(self._tier.client.drain(timeout_s), "chunk", timeout_s)
        self._tier.close()

    def on_broken(self) -> None:
        self.planner.counters["internal_errors"] += 1
        self._tier.client.close()

    def _rows(self, job: TransferJob) -> list[tuple[RowKey, int]]:
        end_of = job.req_context.get_offload_key_position
        keys = [RowKey(key, self._chunk(key), end_of(key)) for key in job.keys]
        return list(zip(keys, job.chunk_ids.tolist(), strict=True))

    def _chunk(self, key: OffloadKey) -> ChunkKey:
        """vLLM's key: the hash of the chunk's last block, and the number of its group."""
        block_hash, group = key[:-4], int.from_bytes(key[-4:], "big")
        return ChunkKey(group, salted(block_hash, self._salt))

    def _send(self, jobs: Iterable[BucketJob]) -> None:
        for job in jobs:
            if job.kind is JobKind.UPLOAD:
                self._erase(job.key.group, job.slot)
            self._tier.client.submit(job)

    def _cancel(self) -> None:
        for job_id in self.planner.transfers.take_cancels():
            self._tier.client.cancel(job_id)

    def take_events(self) -> Iterable[OffloadingEvent]:
        changes, self.planner.changes = self.planner.changes, []
        return [
            OffloadingEvent([name], self.medium, not is_there, self.locality, self.tier_type)
            for name, is_there in changes
        ]

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        kinds: dict[str, type[OffloadingMetricMetadata]] = {
            "counter": OffloadingCounterMetadata,
            "gauge": OffloadingGaugeMetadata,
            "histogram": OffloadingHistogramMetadata,
        }
        definitions = {}
        for name, metric in TIER_METRICS.items():
            more = {"buckets": metric.buckets} if metric.kind == "histogram" else {}
            definitions[f"{NAMESPACE}{name}"] = kinds[metric.kind](
                documentation=metric.doc, labelnames=tuple(metric.labels), **more
            )
        return definitions

    def get_stats(self) -> OffloadingConnectorStats | None:
        self._telemetry.is_stale = True
        counters = (self.planner.counters, self._tier.client.counters)
        values = self._first | self._telemetry.take(self._gauges, *counters)
        self._first = {}
        return _stats(values) if values else None

    @guarded(default=dict)
    def _gauges(self) -> Values:
        now = self.planner.breaker.state
        return {
            "prefill_tokens_per_s": self.planner.pace.prefill_tokens_per_s,
            **{f"breaker|{state.value}": int(state is now) for state in BreakerState},
        }


def _stats(values: Values) -> OffloadingConnectorStats:
    """Values of `TIER_METRICS` as the statistics of a tier of vLLM's offloading."""
    stats = OffloadingConnectorStats()
    for key, value in values.items():
        metric, name = TIER_METRICS[name_of(key)], f"{NAMESPACE}{name_of(key)}"
        if metric.kind == "histogram":
            for observed in value:
                stats.observe_histogram(name, observed, labels_of(key))
        elif metric.kind == "gauge":
            stats.set_gauge(name, value, labels_of(key))
        else:
            stats.increase_counter(name, value * metric.scale, labels_of(key))
    return stats
