"""vLLM's own scheduler with few blocks, and our connector in it, over a simulated rank.

    requests ─▶ vLLM's Scheduler ─▶ its blocks, queues and admission: all real
                    │        ▲
          plan of a step     reports, loads that ended, tokens
                    ▼        │
                a rank that moves meanings instead of bytes, in virtual time

What a rank is ordered to do ends after a random number of steps, in any order, and may fail. Tokens
that a step reads have to be in the blocks where vLLM expects them.
"""

from __future__ import annotations

import copy
import itertools
import random
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from lab.books import check
from s3kv.connectors import kv_scheduler
from s3kv.connectors.kv_translate import WorkerHandshake, WorkerReport
from s3kv.connectors.plugin import register
from s3kv.planning.group_kinds import Coverage
from s3kv.types import Outcome
from tests.contract.configurations import SHAPE, configured
from tests.unit.planning.ranks import Bucket, Rank, Write
from tests.unit.planning.setup import Prefixes

BLOCK, CHUNK = 16, 32
"""Tokens of a block and of a chunk."""
STEP_S = 0.05
SAMPLED = 7
"""The token that every request samples."""
PATIENCE = 400
"""Steps in a row in which nothing is computed. No order takes more than `SLOWEST` steps, a request
waits for a few of them one after the other, and for the bucket `max_wait_ms` at the most."""
SLOWEST = 30


class Parked(AssertionError):
    """Requests wait, and nothing that they could wait for is under way."""


def configuration(model: Path) -> Any:
    """The configuration of an engine with our connector."""
    register()
    transfer = {
        "kv_connector": "S3KVConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "bucket": "bucket",
            "chunk_tokens": CHUNK,
            "max_wait_ms": 5_000,
        },
    }
    return configured(model, kv_transfer_config=transfer, block_size=BLOCK)


class Engine:
    """blocks: those that requests can have; one more is vLLM's. slots: chunks that host memory
    holds. before: an engine on the same bucket, which has ended. failing: the share of orders that
    fail. settings: vLLM's, of its scheduler and connector. With async_scheduling, which vLLM turns
    off on a CPU, a step is scheduled before the output of the one before is taken in.
    """

    def __init__(
        self,
        vllm_config: Any,
        rng: random.Random,
        *,
        blocks: int,
        slots: int = 16,
        before: Engine | None = None,
        failing: float = 0.0,
        **settings: Any,
    ) -> None:
        config = copy.deepcopy(vllm_config)
        for name, value in settings.items():
            owner = config.scheduler_config
            if not hasattr(owner, name):
                owner = config.kv_transfer_config
            setattr(owner, name, value)
        spec = FullAttentionSpec(**SHAPE | {"block_size": BLOCK})
        cache = KVCacheConfig(blocks + 1, [], [KVCacheGroupSpec(["layer.0"], spec)])
        config.cache_config.num_gpu_blocks = blocks + 1
        block_size, hashed = resolve_kv_cache_block_sizes(cache, config)
        self.scheduler = config.scheduler_config.get_scheduler_cls()(
            vllm_config=config,
            kv_cache_config=cache,
            structured_output_manager=StructuredOutputManager(config),
            block_size=block_size,
            hash_block_size=hashed,
        )
        self.connector = self.scheduler.connector
        self.connector.set_xfer_handshake_metadata({0: WorkerHandshake("n" * 32, slots, 4_096)})
        hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_function)
        self._hasher = get_request_block_hasher(hashed, hash_function)
        self.bucket = Bucket() if before is None else before.bucket
        self.rank = Rank(
            0, slots=slots, blocks=blocks + 1, tables=[Coverage(BLOCK, CHUNK)], bucket=self.bucket
        )
        self.seen: Counter[str] = Counter()
        self.now_s = 0.0
        self.steps = 0
        self._numbers = itertools.count(1)
        self._blocks = blocks
        self._rng = rng
        self._failing = failing
        self._due: dict[tuple[str, int | str], int] = {}
        self._outputs: deque[tuple[SchedulerOutput, set[str]]] = deque()
        self._ahead = int(config.scheduler_config.async_scheduling)
        self._prefixes: Prefixes = Prefixes() if before is None else before._prefixes

    # --- requests --------------------------------------------------------------------------

    def add(self, prompt: list[int], *, new_tokens: int = 1, priority: int = 0) -> str:
        """A new request. Alone it fits."""
        assert len(prompt) + new_tokens <= self._blocks * BLOCK
        request_id = f"r{next(self._numbers)}"
        sampling = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
        self.scheduler.add_request(
            Request(
                request_id, prompt, sampling, None, priority=priority, block_hasher=self._hasher
            )
        )
        return request_id

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    @property
    def unfinished(self) -> list[str]:
        requests = self.scheduler.requests.values()
        return [r.request_id for r in requests if not RequestStatus.is_finished(r.status)]

    # --- steps -----------------------------------------------------------------------------

    def finish(self) -> None:
        """Step until every request has ended. Raises `Parked` if that never happens."""
        quiet = 0
        while self.unfinished:
            quiet = 0 if self.step() else quiet + 1
            if quiet > PATIENCE:
                raise Parked(self.described())
        for _ in range(PATIENCE):
            self.step()
            if not (self.rank.orders or self.scheduler.requests):
                break
        while self._outputs:
            self._take_in(*self._outputs.popleft())
        assert not self.scheduler.requests, self.described()

    def step(self) -> int:
        """One pass of the scheduler, and the output of this step or of the one before. Returns the
        number of tokens that it computes."""
        self.steps += 1
        self.now_s += STEP_S
        output = self.scheduler.schedule()
        self.seen["preempted"] += len(output.preempted_req_ids or ())
        requests = [self.scheduler.requests[name] for name in output.num_scheduled_tokens]
        sampling = {r.request_id for r in requests if r.num_computed_tokens >= r.num_tokens}
        self.rank.run(output.kv_connector_metadata.plan, list(self._forward(output)))
        self._outputs.append((output, sampling))
        self._end_orders()
        if len(self._outputs) > self._ahead:
            self._take_in(*self._outputs.popleft())
        return int(output.total_num_scheduled_tokens)

    def _forward(self, output: SchedulerOutput) -> Iterator[Write]:
        """What the step writes. What it reads has to be there, or is written in the same step."""
        written, read = {}, {}
        for request_id, count in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[request_id]
            (table,) = self.scheduler.kv_cache_manager.get_block_ids(request_id)
            end = request.num_computed_tokens
            chain: list[int] = []
            for token in [*request.all_token_ids, SAMPLED, SAMPLED][:end]:
                self._prefixes.extend(chain, token)
            for position, prefix in enumerate(chain):
                at, offset = divmod(position, BLOCK)
                known = written if position >= end - count else read
                known[table[at], offset] = (0, prefix)
        for (block, offset), meaning in read.items():
            found = written.get((block, offset), self.rank.blocks[block][offset])
            assert found == meaning, f"block {block} has {found} at {offset}, {meaning} is read"
        return ((block, offset, meaning) for (block, offset), meaning in written.items())

    def _end_orders(self) -> None:
        orders = list(self.rank.orders)
        self._rng.shuffle(orders)
        for name in orders:
            kind, number = name
            steps = self._rng.choice([0, 1, 3, SLOWEST])
            if self._due.setdefault(name, self.steps + steps) > self.steps:
                continue
            del self._due[name]
            outcome = Outcome.OK
            if kind == "fetch" and number in self.rank.cancelled:
                outcome = Outcome.CANCELLED
            elif self._rng.random() < self._failing:
                outcome = Outcome.FAILED
            self.rank.end(name, outcome)

    def _take_in(self, output: SchedulerOutput, sampling: set[str]) -> None:
        names = list(output.num_scheduled_tokens)
        report, ends = self.rank.take_report(), dict(self.rank.loaded)
        self.rank.loaded.clear()
        is_told = bool(report.ends) or report.number is not None
        told = KVConnectorOutput(
            finished_recving=set(ends) or None,
            failed_recving={name for name, ok in ends.items() if not ok},
            kv_connector_worker_meta=WorkerReport(report) if is_told else None,
        )
        ran = ModelRunnerOutput(
            names,
            {name: place for place, name in enumerate(names)},
            sampled_token_ids=[[SAMPLED] if name in sampling else [] for name in names],
            kv_connector_output=told,
        )
        self.scheduler.update_from_output(output, ran)

    # --- afterwards ------------------------------------------------------------------------

    @property
    def side(self) -> kv_scheduler.SchedulerSide:
        return self.connector._scheduler  # type: ignore[no-any-return]

    def check(self) -> None:
        """Everything has ended: nothing is held, and nothing of ours has broken."""
        assert self.side.broken is None
        check(self.side.planner)
        free = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        assert free == self._blocks, f"{self._blocks - free} blocks are held for nobody"

    def described(self) -> str:
        """The requests and the jobs in flight, for a person."""
        free = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        lines = [f"step {self.steps}: {free} of {self._blocks} blocks are free"]
        for one in self.scheduler.requests.values():
            (table,) = self.scheduler.kv_cache_manager.get_block_ids(one.request_id)
            tokens = f"{one.num_computed_tokens} of {one.num_tokens} tokens computed"
            lines.append(f"  {one.request_id}: {one.status.name}, {tokens}, {len(table)} blocks")
        return "\n".join([*lines, f"  in flight: {sorted(map(str, self.rank.orders))}"])


def on_clock(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> Engine:
    """The engine, whose connector reads its virtual time."""
    clock = SimpleNamespace(monotonic=lambda: engine.now_s)
    monkeypatch.setattr(kv_scheduler, "time", clock)
    return engine
