"""The worker's side of the KV connector: one rank's slab, I/O process and device copies.

Lives in each worker process, on the thread that runs the model.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from s3kv.config import Config
from s3kv.connectors.bucket import wait_for_bucket
from s3kv.connectors.guard import Guarded, guarded
from s3kv.connectors.identity import fingerprint
from s3kv.connectors.kv_messages import WorkerHello, WorkerReport
from s3kv.connectors.metrics import Meter, S3KVStats, add
from s3kv.connectors.translate import GROUP, KVGeometry, shard_name, writes_before_fences
from s3kv.device.copies import BlockCopies
from s3kv.device.layout import PageLayout
from s3kv.device.nearby import memory_near
from s3kv.errors import ConfigError, IoProcessError, StoreError
from s3kv.host.processors import beside_the_model
from s3kv.host.slab import Slab
from s3kv.io.client import IoClient
from s3kv.io.wire import Hello
from s3kv.messages import StepPlan, StepReport
from s3kv.metrics import KV_METRICS
from s3kv.objects.codec import ChunkFormat
from s3kv.objects.integrity import Integrity
from s3kv.objects.keys import Namespace, canonical_json, fingerprint_digest
from s3kv.worker import RankWorker

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger("s3kv")

_PAGE_BYTES = 4096
_LAUNCH_S = 5.0
"""Far longer than it takes to launch what a step can order."""
_SUSPEND_S = 60.0
"""Far longer than copies take, even unpinned. What comes after it fails the engine."""


class WorkerSide(Guarded):
    """Made before the KV caches exist; of use from `register` on."""

    def __init__(
        self,
        config: Config,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        sizes: KVGeometry,
        *,
        sleep_is_told: bool = True,
    ) -> None:
        """sleep_is_told: `suspend` is called before an engine sleeps."""
        self._config = config
        self._integrity = Integrity.of(config)
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._sizes = sizes
        self._meter = Meter()
        self._io_meter = Meter()
        self._rank: RankWorker | None = None
        self._client: IoClient | None = None
        self._slab: Slab | None = None
        self._hello: WorkerHello | None = None
        self._started = False
        self._hello_is_owed = True
        """Nobody has asked: under `MultiConnector` only the first connector with a hello is."""
        self._stranded: set[str] = set()
        self._prefault: threading.Thread | None = None
        self._closing = threading.Event()
        self._fences_at_once = writes_before_fences(vllm_config, kv_cache_config, sizes)
        # A copy that is not launched yet is not waited for by vLLM, which waits for the device
        # and then takes the memory away.
        self._launches_at_once = (
            not sleep_is_told
            and vllm_config.model_config.enable_sleep_mode
            and vllm_config.device_config.device_type != "cpu"
        )

    # --- start and end: these may raise, and wait ------------------------------------------

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Lay out the slab for these caches and start the I/O process, which tries the bucket
        while the engine warms up. Raises `ConfigError` or `UnsupportedError`.
        """
        group = self._kv_cache_config.kv_cache_groups[GROUP]
        layout = PageLayout.of(
            kv_caches,
            self._kv_cache_config.num_blocks,
            group.layer_names,
            self._sizes.chunk_blocks,
        )
        identity = self._identity(layout)
        namespace = Namespace(self._config.prefix, fingerprint_digest(identity))
        shard, is_first_rank = self._place()
        chunk = ChunkFormat(namespace.digest, layout.tensors, GROUP, shard, self._integrity)
        slot_bytes, count = self._slots(chunk)
        self._slab = Slab.create(
            count * slot_bytes,
            node=memory_near(layout.device),
            huge_pages=self._config.huge_pages,
        )
        hello = Hello(
            config=self._config,
            namespace_prefix=namespace.prefix,
            namespace_digest=namespace.digest,
            shard=shard,
            groups={GROUP: layout.tensors},
            integrity=self._integrity,
            # One rank is enough to say what all of them are.
            manifest=canonical_json(identity) if is_first_rank else b"",
        )
        computes_here = layout.device.type == "cpu"
        self._client = IoClient(
            hello, self._slab, processors=beside_the_model() if computes_here else None
        )
        self._client.start()
        copies = BlockCopies.open(
            {GROUP: layout}, self._slab.view, slot_bytes, {GROUP: chunk.header_bytes}
        )
        self._rank = RankWorker(
            copies=copies,
            client=self._client,
            slot_bytes=slot_bytes,
            block_bytes={GROUP: layout.payload_bytes // self._sizes.chunk_blocks},
            clock=time.monotonic,
        )
        if not copies.statistics().pinned:
            self._start_prefault(self._slab)
        self._hello = WorkerHello(namespace.digest, count, slot_bytes)

    def _slots(self, chunk: ChunkFormat) -> tuple[int, int]:
        """Bytes of one, and how many there are."""
        slot_bytes = -(-chunk.object_bytes // _PAGE_BYTES) * _PAGE_BYTES
        count = self._config.host_bytes // slot_bytes
        if count < 1:
            raise ConfigError(
                f"host_bytes is {self._config.host_bytes}: allowed is at least one chunk, which "
                f"is {slot_bytes} bytes for this model (or make chunk_tokens smaller)"
            )
        return slot_bytes, count

    def _start_prefault(self, slab: Slab) -> None:
        """Pinning touches every page of the slab; without it the first copies would have to, or
        this thread beside the first requests. So it is waited for, like pinning.
        """
        self._prefault = threading.Thread(
            target=slab.prefault, args=(self._closing.is_set,), daemon=True
        )
        self._prefault.start()

    def hello(self) -> WorkerHello:
        """Wait until the bucket has been tried. Raises a `StoreError` when it cannot be used and
        `on_unavailable` is "fail".

        Only the first time: vLLM 0.33 asks again when an engine wakes up, and then a bucket that
        fails is one that fails later.
        """
        assert self._client is not None, "register comes first"
        assert self._hello is not None
        self._hello_is_owed = False
        if not self._started:
            wait_for_bucket(self._client, self._config)
            if self._prefault is not None:
                self._prefault.join()
            self._started = True
        return self._hello

    def shutdown(self) -> None:
        """Finish uploads within `drain_timeout_s`, then give everything back. Idempotent."""
        self._closing.set()
        rank, self._rank = self._rank, None
        if rank is not None:
            left = rank.shutdown(self._config.drain_timeout_s)
            if left:
                logger.warning(
                    "s3kv: %d uploads were not finished within drain_timeout_s=%g; those chunks "
                    "are not in the bucket",
                    left,
                    self._config.drain_timeout_s,
                )
        if self._prefault is not None:
            self._prefault.join()
        if self._slab is not None:
            self._slab.close()

    def _identity(self, layout: PageLayout) -> dict[str, Any]:
        page = {
            "chunk_blocks": self._sizes.chunk_blocks,
            "layers": _distinct(layout.describe()["layers"]),
        }
        return fingerprint(
            self._config,
            self._vllm_config,
            self._kv_cache_config,
            self._sizes,
            page,
            self._integrity,
        )

    def _place(self) -> tuple[str, bool]:
        """This rank's part of every chunk, and whether it is the first of all ranks."""
        from vllm.distributed.parallel_state import get_pp_group, get_tp_group

        tp, pp = get_tp_group(), get_pp_group()
        shard = shard_name(
            tp_rank=tp.rank_in_group,
            tp_size=tp.world_size,
            pp_rank=pp.rank_in_group,
            pp_size=pp.world_size,
        )
        return shard, tp.rank_in_group == pp.rank_in_group == 0

    def on_broken(self) -> None:
        """The engine still waits for the loads it has ordered: let them end, as failed."""
        if self._rank is not None:
            self._rank.counters["internal_errors"] += 1
            self._stranded |= self._rank.give_up_loads()

    # --- a step ----------------------------------------------------------------------------

    @guarded(default=lambda: None)
    def begin(self, plan: StepPlan) -> None:
        if self._rank is not None:
            self._rank.begin(plan)

    def load(self, plan: StepPlan) -> None:
        """A load that cannot be started ends as failed: the engine waits for its end."""
        self._stranded.update(plan.abandons)
        if plan.loads and not self._start_loads(plan):
            self._stranded.update(order.request_id for order in plan.loads)

    @guarded(default=lambda: False)
    def _start_loads(self, plan: StepPlan) -> bool:
        assert self._rank is not None
        self._rank.load(plan.loads)
        self._let_launch(self._rank)
        return True

    @guarded(default=lambda: None)
    def save(self, plan: StepPlan) -> None:
        if self._rank is not None:
            self._rank.save(plan.saves, read_first=self._fences_at_once)
            self._let_launch(self._rank)

    def _let_launch(self, rank: RankWorker) -> None:
        if self._launches_at_once and not rank.wait_launched(_LAUNCH_S):
            self._launches_at_once = False
            logger.error(
                "s3kv: copies were not launched within %g s. They are not waited for any more; if "
                "this engine is put to sleep while one is waiting, it may fail",
                _LAUNCH_S,
            )

    @guarded(default=lambda: None)
    def suspend(self) -> None:
        """The engine is about to sleep, and the KV cache's memory to go: no copy touches it when
        this returns, nor until `resume`. Idempotent, as that is.
        """
        if self._rank is not None and not self._rank.suspend(_SUSPEND_S):
            logger.error(
                "s3kv: copies did not end within %g s, and the KV cache's memory goes away now: "
                "this engine may fail",
                _SUSPEND_S,
            )

    @guarded(default=lambda: None)
    def resume(self) -> None:
        if self._rank is not None:
            self._rank.resume()

    def loaded(self, plan: StepPlan) -> tuple[set[str], set[str]]:
        """Requests whose load has ended since the last call, and those whose load failed."""
        stranded, self._stranded = self._stranded, set()
        loaded, failed = self._poll(plan.linger_s)
        return loaded | stranded, failed | stranded

    @guarded(default=lambda: (set(), set()))
    def _poll(self, linger_s: float) -> tuple[set[str], set[str]]:
        assert self._rank is not None
        self._rank.poll(linger_s)
        return self._rank.take_loaded()

    @guarded(default=lambda: None)
    def report(self) -> WorkerReport | None:
        report = self._rank.take_report() if self._rank is not None else None
        if self._hello_is_owed and self._hello is not None:
            return WorkerReport(report or StepReport(), self._late_hello())
        return WorkerReport(report) if report is not None else None

    def _late_hello(self) -> tuple[WorkerHello, ...]:
        """The I/O process has tried the bucket while the engine warmed up: this hardly waits."""
        try:
            return (self.hello(),)
        except (IoProcessError, StoreError):
            logger.error("s3kv: this engine has started, and serves without its cache")
            return ()

    def stats(self) -> S3KVStats | None:
        if self._rank is None or self._client is None:
            return None
        values = self._meter.grown(self._rank.counters)
        add(values, self._io_meter.grown(self._client.counters), KV_METRICS)
        add(values, self._rank.take_seconds(), KV_METRICS)
        return S3KVStats(data=values) if values else None


def _distinct(layers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The kinds of layers, without their names: the same on every pipeline rank."""
    kinds: list[dict[str, Any]] = []
    for layer in layers:
        kind = {name: value for name, value in layer.items() if name != "name"}
        if kind not in kinds:
            kinds.append(kind)
    return kinds
