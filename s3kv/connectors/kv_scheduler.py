"""Scheduler side of the KV connector: turns vLLM's hooks into planner events, plans into metadata.

It runs in the engine-core process, on its only thread. No hook blocks.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product, takewhile
from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_utils import BlockHashListWithBlockSize, make_block_hash_with_group_id

from s3kv.config import Config
from s3kv.connectors.adapters import KnownAdapters
from s3kv.connectors.events import KVEvents
from s3kv.connectors.guard import Guarded, guarded
from s3kv.connectors.kv_groups import NULL_BLOCK
from s3kv.connectors.kv_translate import (
    KVGeometry,
    WorkerHandshake,
    WorkerReport,
    scheduled_requests,
    written_blocks,
)
from s3kv.connectors.linger import LINGER_S, Linger
from s3kv.connectors.log import PromptTraffic, start_line
from s3kv.connectors.metrics import S3KVStats, Values
from s3kv.connectors.request_hashes import RequestHashes
from s3kv.connectors.request_params import params_of, read_limits, reads
from s3kv.connectors.telemetry import KV_SHARES, Telemetry, host_gauges
from s3kv.errors import UnsupportedError
from s3kv.host.room import room_for
from s3kv.host.table import Table
from s3kv.messages import StepPlan
from s3kv.metrics import KV_METRICS
from s3kv.planning.breaker import Breaker
from s3kv.planning.index import BucketIndex
from s3kv.planning.kv import KVPlanner, KVPlannerSettings
from s3kv.planning.ledger import Ledger
from s3kv.planning.pace import Pace
from s3kv.planning.requests import RequestLimits

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger("s3kv")


class SchedulerSide(Guarded):
    """Scheduler side of one engine of `world_size` workers. It serves once all of them have
    reported: from `set_workers` on, or, if vLLM passes no reports there, from the step whose output
    brings the last one. Until then requests are computed."""

    def __init__(
        self,
        config: Config,
        sizes: KVGeometry,
        *,
        may_load: bool,
        may_save: bool,
        world_size: int = 1,
        in_lockstep: bool = False,
        publishes_events: bool = False,
        has_priorities: bool = False,
        miscounts_sessions: bool = False,
    ) -> None:
        """has_priorities: vLLM may preempt a request in the pass in which it is scheduled.
        miscounts_sessions: vLLM may count tokens of a session's next turn as computed."""
        self._config, self._sizes, self._world_size = config, sizes, world_size
        self._may_load, self._may_save = may_load, may_save
        self._has_priorities, self._miscounts_sessions = has_priorities, miscounts_sessions
        self._traffic = PromptTraffic()
        self._telemetry = Telemetry(KV_METRICS, KV_SHARES, self._traffic)
        self._slot_bytes = 0
        self.pool: BlockPool | None = None
        """The engine's own cache."""
        self._handshakes: list[WorkerHandshake] = []
        """The workers' reports so far."""
        self._passed_at_start: Counter[WorkerHandshake] | None = None
        """The reports that vLLM passed at the start; None before."""
        self._salt: bytes | None = None
        self.adapters = KnownAdapters()
        self._hashes = RequestHashes(
            trust_media_names=config.trust_media_names, block_tokens=sizes.hash_tokens
        )
        self._events = KVEvents(sizes, is_published=publishes_events)
        self._linger = Linger(LINGER_S, in_lockstep=in_lockstep)
        self._requests: dict[str, Request] = {}
        self._computed: dict[str, int] = {}  # tokens after a request's last step
        self._unplanned: list[str] = []
        """Requests whose load has been promised since the last plan."""
        self.planner = self._make_planner(1, slot_bytes=1, object_bytes=(), serves=False)

    def set_workers(self, handshakes: list[WorkerHandshake]) -> None:
        """Accept the reports of all ranks once they are up. Raises `UnsupportedError` if the ranks
        do not match.

        vLLM 0.33 calls this again whenever the engine wakes up. The planner is then kept: it holds
        the record of slots in use, and the salt that makes earlier chunks unreachable.
        """
        passed = Counter(handshakes)
        if self._passed_at_start is not None:
            if passed != self._passed_at_start:
                raise UnsupportedError("the workers are not those that the engine started with")
            return
        self._passed_at_start = passed
        if handshakes:
            self._start(handshakes)
            return
        logger.info(
            "s3kv: the workers report their host memory in the first step; its requests are "
            "computed (MultiConnector hands on the reports of one connector only)"
        )

    def _start(self, handshakes: list[WorkerHandshake]) -> None:
        """Replace the planner that serves nothing by one for these workers."""
        self._handshakes = handshakes
        if len(handshakes) != self._world_size:
            raise UnsupportedError(
                f"{len(handshakes)} of {self._world_size} workers reported, but s3kv needs all"
            )
        digests = {handshake.namespace for handshake in handshakes}
        if len(digests) != 1:
            raise UnsupportedError(f"the ranks disagree on the namespace: {sorted(digests)}")
        slots = min(handshake.slot_count for handshake in handshakes)
        self._slot_bytes = sum(handshake.slot_bytes for handshake in handshakes)
        # An object has the same place on every rank, so the longest counts.
        object_bytes = tuple(map(max, zip(*(h.object_bytes for h in handshakes), strict=True)))
        loads, saves, coverages = self._may_load, self._may_save, self._sizes.coverages
        logger.log(*start_line(self._config, handshakes, coverages, may_load=loads, may_save=saves))
        idle, slot_bytes = self.planner, handshakes[0].slot_bytes
        self.planner = self._make_planner(slots, slot_bytes, object_bytes, serves=True)
        if self._salt is not None:
            self.planner.reset(self._salt)
        self.planner.adopt(idle)

    def _make_planner(
        self, slots: int, slot_bytes: int, object_bytes: Sequence[int], *, serves: bool
    ) -> KVPlanner:
        config = self._config
        ledger = Ledger(
            Table(room_for(slots, slot_bytes, object_bytes), dict(enumerate(object_bytes))),
            BucketIndex(),
            Breaker(has_disk=config.disk_path is not None),
            world_size=self._world_size,
            may_save=self._may_save,
            residency=self._events.log,
        )
        settings = KVPlannerSettings(
            coverages=self._sizes.coverages,
            hash_tokens=self._sizes.hash_tokens,
            max_wait_s=config.max_wait_ms / 1000,
            may_load=self._may_load and serves,
            may_save=self._may_save and serves,
            null_block=None if self._sizes.is_plain else NULL_BLOCK,
        )
        pace = Pace(fetches_at_once=config.fetches_at_once(max((slot_bytes, *object_bytes))))
        return KVPlanner(ledger, pace, settings)

    @guarded(default=lambda: None)
    def on_new_request(self, request: Request) -> None:
        adapter, lora = None, request.lora_request
        if lora is not None:
            adapter = self.adapters.arrived(request.request_id, lora, time.monotonic())
        self._events.add_request(request)
        self._requests[request.request_id] = request
        if self._miscounts_sessions and self._may_save and getattr(request, "resumable", False):
            self._may_save = self.planner.may_save = False
            logger.warning("s3kv no longer saves: vLLM may keep wrong KV of sessions with drafts")
        limits = read_limits(params_of(request), request.request_id, self.planner.counters)
        self._enter(request, adapter, limits)

    def _enter(self, request: Request, adapter: bytes | None, limits: RequestLimits) -> None:
        self.planner.add_request(request.request_id, self._hashes.of(request, adapter), limits)
        self.planner.bar(self._hashes.take_barred())
        if reads(request):
            local, now_s = self._local_tokens(request), time.monotonic()
            self.planner.prefetch(request.request_id, local, now_s, tokens=request.num_tokens)

    def _settle(self, request: Request) -> None:
        """Fix a request's adapter before it is computed; re-enter the request if the adapter has
        changed. Fix the limits of a session's turn."""
        if getattr(request, "resumable", False):
            self.planner.restrict(request.request_id, read_limits(params_of(request)))
        is_as_believed, adapter = self.adapters.settle(request.request_id)
        if not is_as_believed:
            limits = self.planner.request(request.request_id).limits
            self.planner.finished(request.request_id)
            self._enter(request, adapter, limits)

    def _local_tokens(self, request: Request) -> int:
        """Tokens of the request's prefix in the engine's own cache now, counted in the first group.
        0 unless that group's tables have no gaps and its blocks are hashed one by one."""
        first = self._sizes.coverages[0]
        is_known = first.kind.is_cumulative and first.block_tokens == self._sizes.hash_tokens
        if self.pool is None or not is_known:
            return 0
        find, group = self.pool.get_cached_block, [first.members[0]]
        own = takewhile(lambda block_hash: find(block_hash, group), request.block_hashes)
        return sum(1 for _ in own) * self._sizes.hash_tokens

    @guarded(default=lambda: (0, False))
    def lookup(self, request: Request, computed_tokens: int) -> tuple[int | None, bool]:
        request_id, may_read = request.request_id, reads(request)
        if may_read and self.adapters.waits(request_id, time.monotonic()):
            return None, False
        self._settle(request)
        now_s, tokens = time.monotonic(), request.num_tokens
        answer = self.planner.lookup(
            request_id, computed_tokens, now_s, tokens=tokens, reads=may_read
        )
        self._traffic.looked_up(request_id, tokens, now_s, waits=answer.wait)
        return (None, False) if answer.wait else (answer.tokens, answer.tokens > 0)

    def admitted(self, request: Request, blocks: KVCacheBlocks, external_tokens: int) -> None:
        if external_tokens:
            self._unplanned.append(request.request_id)
        self._admitted(request, blocks, external_tokens)

    @guarded(default=lambda: None)
    def _admitted(self, request: Request, blocks: KVCacheBlocks, external_tokens: int) -> None:
        if not external_tokens:
            self._settle(request)  # vLLM may admit a request without a lookup.
        self.planner.admitted(request.request_id, blocks.get_block_ids(), external_tokens)

    @guarded(default=int)
    def bucket_tokens(self, request: Request, external_tokens: int) -> int:
        return self.planner.bucket_tokens(request.request_id, external_tokens)

    def plan(self, output: SchedulerOutput) -> StepPlan:
        """The plan of a step. If the planner has failed, the plan abandons the loads promised since
        the last one, and fences all saves under way, because the engine may reuse their blocks."""
        plan = self._plan(output)
        unplanned, self._unplanned = self._unplanned, []
        if plan is None:
            fences = tuple(sorted(self.planner.ledger.copies_inflight))
            plan = StepPlan(abandons=tuple(unplanned), fences=fences)
        return plan

    @guarded(default=lambda: None)
    def _plan(self, output: SchedulerOutput) -> StepPlan | None:
        for new in output.scheduled_new_reqs:
            self._hashes.scheduled(new.req_id, new.mm_features)
            self._traffic.scheduled(new.req_id, new.num_computed_tokens)
        self.planner.bar(self._hashes.take_barred())
        if self._has_priorities and self.pool is not None:
            preempted = (output.preempted_req_ids or set()) - output.num_scheduled_tokens.keys()
            self._forget_uncomputed(self.pool, preempted & self._requests.keys())
        scheduled = [*scheduled_requests(output, self._sizes)]
        for step in scheduled if self._has_priorities else ():
            self._computed[step.request_id] = step.computed_tokens + step.scheduled_tokens
        plan = self.planner.plan(scheduled, time.monotonic(), *written_blocks(output))
        if pause_s := self._linger.pause_s(output, lambda: self.planner.has_arrivals_inflight):
            plan = replace(plan, linger_s=pause_s)
        self._events.read()
        self._telemetry.log(self.planner.ledger, time.monotonic())
        return plan

    def _forget_uncomputed(self, pool: BlockPool, preempted: Iterable[str]) -> None:
        """Remove from vLLM's cache the blocks that it gave to these requests in this pass and then
        took back. They are hashed but never computed (vllm#57580): requests that hit them would get
        wrong answers, and their chunks would be uploaded."""
        wrong, known = set[bytes](), self._sizes.hash_tokens
        for request_id in preempted:
            computed = self._computed.get(request_id, 0)
            own: Sequence[Any] = self._requests[request_id].block_hashes
            for coverage in self._sizes.coverages:
                size = coverage.block_tokens
                hashes = own if size == known else BlockHashListWithBlockSize(own, known, size)
                for block_hash, group in product(hashes[computed // size :], coverage.members):
                    if pool.get_cached_block(block_hash, [group]):
                        wrong.add(make_block_hash_with_group_id(block_hash, group))
        if wrong:
            pool.evict_blocks({b.block_id for b in pool.blocks if b.block_hash in wrong})

    @guarded(default=lambda: None)
    def on_output(self, output: KVConnectorOutput) -> None:
        now_s = time.monotonic()
        report = output.kv_connector_worker_meta
        is_ours = isinstance(report, WorkerReport)
        self.planner.pace.step_ended(now_s, report.report.number if is_ours else None)
        if is_ours:
            if report.broken:
                self.broken = "report"
            self._telemetry.is_stale |= bool(report.report.ends or report.handshakes)
            if report.handshakes:
                self._handshakes += report.handshakes
                if len(self._handshakes) == self._world_size:
                    self._start(self._handshakes)
            if report.adapters is not None:
                self.planner.bar(self.adapters.on_report(report.adapters))
            self.planner.on_report(report.report, now_s)
            self._traffic.reported(report.report)
        if output.finished_recving:
            self._telemetry.is_stale = True
            # vLLM reports a failure together with the end of the load on the last rank.
            self.planner.loaded(output.finished_recving, output.failed_recving)
        self._events.read()

    @guarded(default=lambda: None)
    def on_finished(self, request: Request) -> None:
        self._telemetry.is_stale = True
        self._hashes.finished(request.request_id)
        self._requests.pop(request.request_id, None)
        self._computed.pop(request.request_id, None)
        self.adapters.finished(request.request_id)
        self.planner.finished(request.request_id)
        self._events.finished(request)
        now_s = time.monotonic()
        self._traffic.finished(request.request_id, now_s)
        self._telemetry.log(self.planner.ledger, now_s, finished=True)

    @guarded(default=tuple)
    def take_events(self) -> Iterable[KVCacheEvent]:
        return self._events.take()

    @guarded(default=lambda: False)
    def has_copies_inflight(self) -> bool:
        return self.planner.ledger.has_copies_inflight

    @guarded(default=lambda: True)  # nothing is served
    def reset(self) -> bool:
        self._salt = secrets.token_bytes(32)
        self.planner.reset(self._salt)
        self._events.reset()
        logger.info("s3kv: cache reset; earlier chunks are unreachable now")
        return True

    def stats(self) -> S3KVStats | None:
        data = self._telemetry.take(self._read_gauges, self.planner.counters, self._hashes.counters)
        return S3KVStats(data=data) if data else None

    @guarded(default=dict)
    def _read_gauges(self) -> Values:
        ledger, speed = self.planner.ledger, self.planner.pace.prefill_tokens_per_s
        # Rounded to three digits, because every large step changes the measured speed.
        rounded = {"prefill_tokens_per_s": float(f"{speed:.3g}")}
        return host_gauges(ledger, self._slot_bytes) | rounded

    def on_broken(self) -> None:
        self.planner.counters["internal_errors"] += 1
