"""The scheduler's side of the KV connector: engine hooks to planner events and back.

Lives in the engine-core process, on its one thread. No hook waits for anything.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from s3kv.config import Config
from s3kv.connectors.guard import Guarded, guarded
from s3kv.connectors.kv_gauges import KV_SHARES, kv_gauges
from s3kv.connectors.kv_messages import WorkerHello, WorkerReport
from s3kv.connectors.metrics import Gauges, Meter, S3KVStats, Values
from s3kv.connectors.observers import Observers
from s3kv.connectors.requests import RequestHashes
from s3kv.connectors.translate import GROUP, KVGeometry, scheduled_requests
from s3kv.errors import ConfigError, UnsupportedError
from s3kv.host.policy import make_policy
from s3kv.host.slots import SlotTable
from s3kv.messages import StepPlan
from s3kv.planning.breaker import Breaker
from s3kv.planning.index import BucketIndex
from s3kv.planning.kv import KVPlanner
from s3kv.planning.ledger import ChunkLedger
from s3kv.planning.pace import Pace
from s3kv.planning.prefix import KVPlannerSettings

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger("s3kv")

_INDEX_CHUNKS = 2_000_000
"""Verdicts remembered at most; about 150 bytes each, so 300 MB when full. Two million chunks of
256 tokens are 512 million tokens."""

_LINGER_S = 0.004
"""What a request that arrives while all others wait for s3kv may lose. vLLM's own loop looks for
new requests every 1.3 ms, but burns a third of a core with it that the I/O process and, in a test
set-up, the S3 server can use."""

_BREAKER_FAILURES = 5
"""Failures in a row that open the breaker: more than one request's first window."""


class SchedulerSide(Guarded):
    """Made before the workers have reported; of use from `set_workers` on, or, where that brings
    no report of theirs, from the first step's output on.
    """

    def __init__(
        self,
        config: Config,
        sizes: KVGeometry,
        *,
        may_load: bool,
        may_save: bool,
        observers: Observers | None = None,
    ) -> None:
        self._config = config
        self._sizes = sizes
        self._may_load = may_load
        self._may_save = may_save
        self._meter = Meter(shares=KV_SHARES)
        self._gauges = Gauges()
        self._slot_bytes = 0
        self._stirred = True
        """Something happened since the gauges were last looked at."""
        self._pool: BlockPool | None = None
        self._planner: KVPlanner | None = None
        self._hellos: list[WorkerHello] = []
        """Of all workers, or, while the planner is a stand-in, of those that have reported."""
        self._world_size = 0
        self._hears_in_steps = False
        self._salt: bytes | None = None
        self._hashes = RequestHashes()
        self._observers = observers
        self._unplanned: list[str] = []
        self._was_idle = False

    @property
    def planner(self) -> KVPlanner:
        if self._planner is None:
            raise UnsupportedError(
                "the workers have not told the scheduler of their host memory: this vLLM does not "
                "exchange KV-connector handshake metadata (it should: 0.29 to 0.33 do)"
            )
        return self._planner

    def set_workers(self, hellos: list[WorkerHello], world_size: int) -> None:
        """All ranks are up. Raises `UnsupportedError` when they do not fit together.

        vLLM 0.33 tells it again whenever the engine wakes up. The planner stays what it is: it
        knows which slots are in use, and the salt that keeps what was cached before out of reach.
        """
        if self._planner is not None:
            known = () if self._hears_in_steps else self._hellos
            if Counter(hellos) != Counter(known):
                raise UnsupportedError("the workers are not those that the engine started with")
            return
        self._world_size = world_size
        self._hears_in_steps = not hellos
        if hellos:
            self._planner = self._start(hellos)
            return
        logger.info(
            "s3kv: the workers tell of their host memory in the first step; the requests in it are "
            "computed (MultiConnector hands on the reports of one connector only)"
        )
        self._planner = self._make_planner(1, slot_bytes=1, serves=False)

    def _start(self, hellos: list[WorkerHello]) -> KVPlanner:
        if len(hellos) != self._world_size:
            raise UnsupportedError(
                f"{len(hellos)} of {self._world_size} workers reported; s3kv needs a report of each"
            )
        digests = {hello.namespace for hello in hellos}
        if len(digests) != 1:
            raise UnsupportedError(f"the ranks disagree on the namespace: {sorted(digests)}")
        slots = min(hello.slot_count for hello in hellos)
        self._slot_bytes = sum(hello.slot_bytes for hello in hellos)
        if slots < 1:
            need = max(hello.slot_bytes for hello in hellos)
            raise ConfigError(
                f"host_bytes is {self._config.host_bytes}: allowed is at least one chunk, "
                f"{need} bytes here (or make chunk_tokens smaller)"
            )
        self._hellos = hellos
        logger.info(
            "s3kv: bucket %s, namespace %s, %d ranks, %d slots of %d tokens",
            self._config.bucket,
            digests.pop(),
            self._world_size,
            slots,
            self._sizes.chunk_tokens,
        )
        return self._make_planner(slots, hellos[0].slot_bytes)

    def _report_late(self, hellos: Sequence[WorkerHello]) -> None:
        """Replace the stand-in for the planner once all ranks have reported."""
        if len(self._hellos) == self._world_size:
            return
        self._hellos += hellos
        if len(self._hellos) == self._world_size:
            stand_in, self._planner = self.planner, self._start(self._hellos)
            if self._salt is not None:
                self._planner.reset(self._salt)
            self._planner.adopt(stand_in)

    def _make_planner(self, slots: int, slot_bytes: int, *, serves: bool = True) -> KVPlanner:
        config = self._config
        ledger = ChunkLedger(
            SlotTable(slots, make_policy(config.eviction, slots)),
            BucketIndex(capacity=_INDEX_CHUNKS, miss_ttl_s=config.miss_ttl_s),
            Breaker(threshold=_BREAKER_FAILURES),
            world_size=self._world_size,
            residency=None if self._observers is None else self._observers.log,
        )
        settings = KVPlannerSettings(
            chunk_tokens=self._sizes.chunk_tokens,
            block_tokens=self._sizes.block_tokens,
            hash_tokens=self._sizes.hash_tokens,
            probe_chunks=config.probe_chunks,
            max_wait_s=config.max_wait_ms / 1000,
            recompute_gate=config.recompute_gate,
            max_saves_inflight=config.max_saves_inflight,
            may_load=self._may_load and serves,
            may_save=self._may_save and serves,
            group=GROUP,
        )
        pace = Pace(
            prefill_tokens_per_s=config.prefill_tokens_per_s,
            fetches_at_once=config.fetches_at_once(slot_bytes),
        )
        return KVPlanner(ledger, pace, settings)

    # --- hooks -----------------------------------------------------------------------------

    def bind_pool(self, pool: BlockPool) -> None:
        self._pool = pool

    @guarded(default=lambda: None)
    def on_new_request(self, request: Request) -> None:
        self.planner.add_request(request.request_id, self._hashes.of(request))
        if self._observers is not None:
            self._observers.add_request(request)
        if not request.skip_reading_prefix_cache:
            local = self._local_tokens(request)
            self.planner.prefetch(request.request_id, local, time.monotonic())

    def _local_tokens(self, request: Request) -> int:
        """The prefix the engine's own cache holds right now."""
        if self._pool is None:
            return 0
        blocks = 0
        for block_hash in request.block_hashes:
            if self._pool.get_cached_block(block_hash, [GROUP]) is None:
                break
            blocks += 1
        return blocks * self._sizes.hash_tokens

    @guarded(default=lambda: (0, False))
    def lookup(self, request: Request, computed_tokens: int) -> tuple[int | None, bool]:
        reads = not request.skip_reading_prefix_cache
        answer = self.planner.lookup(
            request.request_id, computed_tokens, time.monotonic(), reads=reads
        )
        if reads and self._observers is not None:
            request_id = request.request_id
            self._observers.looked_up(request_id, waits=answer.wait, tokens=answer.tokens)
        if answer.wait:
            return None, False
        return answer.tokens, answer.tokens > 0

    def admitted(self, request: Request, blocks: KVCacheBlocks, external_tokens: int) -> None:
        if external_tokens:
            self._unplanned.append(request.request_id)
        self._admitted(request, blocks, external_tokens)

    @guarded(default=lambda: None)
    def _admitted(self, request: Request, blocks: KVCacheBlocks, external_tokens: int) -> None:
        ids = blocks.get_block_ids()[GROUP]
        self.planner.admitted(request.request_id, ids, external_tokens)

    def bucket_tokens(self, request: Request, external_tokens: int) -> int:
        if self.broken is not None:
            return 0
        return self.planner.bucket_tokens(request.request_id, external_tokens)

    def plan(self, output: SchedulerOutput) -> StepPlan:
        """Without a planner any more, whoever was promised a load since the last plan is told."""
        plan = self._plan(output)
        unplanned, self._unplanned = self._unplanned, []
        return plan if plan is not None else StepPlan(abandons=tuple(unplanned))

    @guarded(default=lambda: None)
    def _plan(self, output: SchedulerOutput) -> StepPlan | None:
        plan = self.planner.plan(scheduled_requests(output), time.monotonic())
        # Twice, because the step before may still be running when this one is planned.
        idle = output.total_num_scheduled_tokens == 0
        if idle and self._was_idle and self.planner.has_arrivals_inflight:
            plan = replace(plan, linger_s=_LINGER_S)
        self._was_idle = idle
        if self._observers is not None:
            self._observers.read()
        return plan

    @guarded(default=lambda: None)
    def on_output(self, output: KVConnectorOutput) -> None:
        now_s = time.monotonic()
        self.planner.step_ended(now_s)
        report = output.kv_connector_worker_meta
        if isinstance(report, WorkerReport):
            self._stirred = True
            if report.hellos:
                self._report_late(report.hellos)
            self.planner.on_report(report.report, now_s)
        if output.finished_recving:
            self._stirred = True
            failed = getattr(output, "failed_recving", None) or ()
            self.planner.loaded(output.finished_recving, failed)
        if self._observers is not None:
            self._observers.read()

    @guarded(default=lambda: None)
    def on_finished(self, request: Request) -> None:
        self._stirred = True
        self.planner.finished(request.request_id)
        if self._observers is not None:
            self._observers.finished(request)

    @guarded(default=tuple)
    def take_events(self) -> Iterable[KVCacheEvent]:
        return () if self._observers is None else self._observers.take_events()

    @guarded(default=lambda: False)
    def has_copies_inflight(self) -> bool:
        return self._planner is not None and self._planner.has_copies_inflight

    @guarded(default=lambda: False)
    def reset(self) -> bool:
        self._salt = secrets.token_bytes(32)
        self.planner.reset(self._salt)
        if self._observers is not None:
            self._observers.reset()
        logger.info("s3kv: cache reset; what was cached before cannot be reached any more")
        return True

    def stats(self) -> S3KVStats | None:
        if self._planner is None:
            return None
        values = self._meter.grown(self._planner.counters)
        if values or self._stirred:
            values |= self._changed_gauges()
        return S3KVStats(data=values) if values else None

    @guarded(default=dict)
    def _changed_gauges(self) -> Values:
        self._stirred = False
        return self._gauges.changed(kv_gauges(self.planner, self._slot_bytes))

    def on_broken(self) -> None:
        if self._planner is not None:
            self._planner.counters["internal_errors"] += 1
