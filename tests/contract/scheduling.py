"""vLLM's own scheduler with few blocks, and our connector in it, over a simulated rank.

    requests ─▶ vLLM's Scheduler ─▶ its blocks, queues and admission: all real
                    │        ▲
          plan of a step     reports, loads that ended, tokens
                    ▼        │
                ranks that move meanings instead of bytes, in virtual time

What a rank is ordered to do ends after a random number of steps, in any order, and may fail. Tokens
that a step reads have to be in the blocks where vLLM expects them; of a group with states, the last
one. A step may fail as a whole, as vLLM's fault tolerance knows it: all requests are aborted, and
vLLM's aggregator holds back what the ranks have reported.
"""

from __future__ import annotations

import copy
import itertools
import random
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from lab.books import check
from s3kv.connectors import kv_scheduler
from s3kv.connectors.kv_translate import WorkerHandshake, WorkerReport
from s3kv.connectors.plugin import register
from s3kv.types import Outcome
from tests.contract.configurations import SHAPE, configured
from tests.unit.planning.oracle import Told
from tests.unit.planning.ranks import Bucket, Rank, Write
from tests.unit.planning.setup import Prefixes

BLOCK, CHUNK = 16, 32
"""Tokens of a block and of a chunk."""
FULL = FullAttentionSpec(**SHAPE | {"block_size": BLOCK})
FATES = {
    "fetch": [Outcome.FAILED, Outcome.MISSING, Outcome.CORRUPT, Outcome.DENIED],
    "upload": [Outcome.FAILED, Outcome.FAILED, Outcome.DENIED, Outcome.INVALID],
}
"""How orders fail that can do so in several ways."""
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
        "kv_connector_extra_config": {"bucket": "bucket", "chunk_tokens": CHUNK},
    }
    return configured(model, kv_transfer_config=transfer, block_size=BLOCK)


class Engine:
    """blocks: those that requests can have; one more is vLLM's. slots: chunks that host memory
    holds. before: an engine on the same bucket, which has ended. failing: the share of orders that
    fail. ranks: their number. specs: of the KV-cache groups. settings: vLLM's, of its scheduler and
    connector. With async_scheduling, which vLLM turns off on a CPU, a step is scheduled before the
    output of the one before is taken in."""

    def __init__(
        self,
        vllm_config: Any,
        rng: random.Random,
        *,
        blocks: int,
        slots: int = 16,
        before: Engine | None = None,
        failing: float = 0.0,
        ranks: int = 1,
        specs: Sequence[Any] = (FULL,),
        **settings: Any,
    ) -> None:
        config = copy.deepcopy(vllm_config)
        for name, value in settings.items():
            owner = config.scheduler_config
            if not hasattr(owner, name):
                owner = config.kv_transfer_config
            setattr(owner, name, value)
        config.parallel_config.world_size = ranks
        if any(isinstance(spec, MambaSpec) for spec in specs):
            config.cache_config.mamba_cache_mode = "align"
        groups = [KVCacheGroupSpec([f"layer.{number}"], spec) for number, spec in enumerate(specs)]
        cache = KVCacheConfig(blocks + 1, [], groups)
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
        hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_function)
        self._hasher = get_request_block_hasher(hashed, hash_function)
        self._aggregator = KVOutputAggregator(ranks)
        self.seen: Counter[str] = Counter()
        self.now_s = 0.0
        self.steps = 0
        self.weights = 0
        """A number that all KV of an engine has, until it loads others: then a larger one."""
        self._numbers = itertools.count(1)
        self._blocks = blocks
        self._specs = specs
        self._rng = rng
        self._failing = failing
        self._due: dict[tuple[int, str, int | str], int] = {}
        self._outputs: deque[tuple[SchedulerOutput, set[str]]] = deque()
        self._ahead = int(config.scheduler_config.async_scheduling)
        self._prefixes: Prefixes = Prefixes() if before is None else before._prefixes
        self._begin(before, config, cache, slots)

    def _begin(self, before: Any, config: Any, cache: KVCacheConfig, slots: int) -> None:
        """Make the ranks, and a bucket if there is none before."""
        world_size = config.parallel_config.world_size
        handshake = WorkerHandshake("n" * 32, slots, 4_096)
        self.connector.set_xfer_handshake_metadata(dict.fromkeys(range(world_size), handshake))
        self.bucket = Bucket() if before is None else before.bucket
        memory: dict[str, Any] = {"slots": slots, "blocks": cache.num_blocks, "bucket": self.bucket}
        coverages, numbers = self.side._sizes.coverages, range(len(cache.kv_cache_groups))
        tables = [next(c for c in coverages if n in c.members) for n in numbers]
        self.ranks: Any = [Rank(n, tables=tables, **memory) for n in range(world_size)]
        self.private: set[bytes] = set()
        """Hashes of prompts that nobody else has, and that may not be saved."""
        self._told = Told(world_size)
        self._failed: set[str] = set()
        self._waits_since_s: dict[str, float] = {}
        self.side.on_broken = raise_again
        planner, connector = self.side.planner, self.connector
        on_report, self._ask = planner.on_report, connector.get_num_new_matched_tokens
        planner.on_report = lambda report, now_s: (
            self._told.hear(report) or on_report(report, now_s)
        )
        connector.get_num_new_matched_tokens = self._matched

    def _matched(self, request: Any, *args: Any) -> Any:
        """The answer of our connector, which may not be more than the request allows, nor what has
        failed to load for it, nor "wait" for longer than the settings allow."""
        answer, name = self._ask(request, *args), request.request_id
        most = (request.kv_transfer_params or {}).get("max_load_tokens")
        assert most is None or (answer[0] or 0) <= most, f"{name} may load {most}, not {answer[0]}"
        assert not (answer[0] and name in self._failed), f"{name} is offered again what failed"
        if answer[0] is not None:
            self._waits_since_s.pop(name, None)
        else:
            waits_s = self.now_s - self._waits_since_s.setdefault(name, self.now_s)
            assert waits_s < self.side._config.max_wait_ms / 1_000, f"{name} waits {waits_s} s"
        return answer

    def add(
        self, prompt: list[int], *, new_tokens: int = 1, priority: int = 0, **params: int
    ) -> str:
        """A new request. Alone it fits. params: its `kv_transfer_params`; if nothing of it may be
        saved, nobody else has its prompt."""
        assert len(prompt) + new_tokens <= self._blocks // len(self._specs) * BLOCK
        request_id = f"r{next(self._numbers)}"
        extra = {"kv_transfer_params": params} if params else None
        sampling = SamplingParams(max_tokens=new_tokens, ignore_eos=True, extra_args=extra)
        request = Request(
            request_id, prompt, sampling, None, priority=priority, block_hasher=self._hasher
        )
        if params.get("max_offload_tokens") == 0:
            self.private.update(request.block_hashes)
        self.scheduler.add_request(request)
        return request_id

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    @property
    def unfinished(self) -> list[str]:
        requests = self.scheduler.requests.values()
        return [r.request_id for r in requests if not RequestStatus.is_finished(r.status)]

    def finish(self) -> None:
        """Step until every request has ended. Raises `Parked` if that never happens."""
        quiet = 0
        while self.unfinished:
            quiet = 0 if self.step() else quiet + 1
            if quiet > PATIENCE:
                self._abort_what_parks()
                quiet = 0
        for _ in range(PATIENCE):
            self.step()
            if not (any(rank.orders for rank in self.ranks) or self.scheduler.requests):
                break
        while self._outputs:
            self._take_in(*self._outputs.popleft())
        assert not self.scheduler.requests, self.described()

    def _abort_what_parks(self) -> None:
        """vLLM leaves a request whose load has failed, and which has no blocks any more, before
        those that hold some. If it does not fit, all of them park, whatever we do."""
        first = next(iter(getattr(self.scheduler, "kv_holding_waiting", ())), None)
        if first is None or any(self.scheduler.kv_cache_manager.get_block_ids(first.request_id)):
            raise Parked(self.described())
        assert first.request_id in self._failed
        self.seen["parked after a failed load"] += 1
        self.abort(first.request_id)

    def step(self, *, fails: bool = False) -> int:
        """One pass of the scheduler, and the output of this step or of the one before. Returns the
        number of tokens that it computes. fails: its output is an error."""
        self.steps += 1
        self.now_s += STEP_S
        output = self.scheduler.schedule()
        self.seen["preempted"] += len(output.preempted_req_ids or ())
        requests = [self.scheduler.requests[name] for name in output.num_scheduled_tokens]
        sampling = {r.request_id for r in requests if r.num_computed_tokens >= r.num_tokens}
        writes = list(self._forward(output))
        for rank in self.ranks:
            self._run(rank, output.kv_connector_metadata, writes)
        self._end_orders()
        if fails:
            assert not self._ahead
            self._fail()
            return 0
        self._outputs.append((output, sampling))
        if len(self._outputs) > self._ahead:
            self._take_in(*self._outputs.popleft())
        return int(output.total_num_scheduled_tokens)

    def _run(self, rank: Any, metadata: Any, writes: list[Write]) -> None:
        plan = metadata.plan
        if rank is self.ranks[0]:
            check(self.side.planner)
            self._told.check_jobs(plan, [o for rank in self.ranks for o in rank.orders.values()])
            saved = {save.key.block_hash for save in plan.saves}
            assert saved.isdisjoint(self.private), "a request is saved that is private"
        rank.run(plan, writes)

    def _forward(self, output: SchedulerOutput) -> Iterator[Write]:
        """What the step writes. What it reads has to be there, or is written in the same step."""
        written, read, states = {}, {}, {}
        for request_id, count in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[request_id]
            end = request.num_computed_tokens
            start = end - count
            chain: list[int] = []
            for token in [*request.all_token_ids, SAMPLED, SAMPLED][:end]:
                self._prefixes.extend(chain, token)
            tables = self.scheduler.kv_cache_manager.get_block_ids(request_id)
            for number, (spec, table) in enumerate(zip(self._specs, tables, strict=True)):
                size, weights = spec.block_size, self.weights + number
                if isinstance(spec, MambaSpec):
                    for known, tokens in ((states, start), (written, end)):
                        at = (tokens - 1) // size
                        for offset in range(size if tokens else 0):
                            known[table[at], offset] = (weights, chain[tokens - 1])
                    continue
                for position in range(first_seen(spec, start), end):
                    at, offset = divmod(position, size)
                    known = written if position >= start else read
                    known[table[at], offset] = (weights, chain[position])
        for place, meaning in (*read.items(), *states.items()):
            for rank in self.ranks:
                found = rank.blocks[place[0]][place[1]]
                if place in read:
                    found = written.get(place, found)
                assert found == meaning, f"{place} has {found}, and {meaning} is read"
        return ((block, offset, meaning) for (block, offset), meaning in written.items())

    def _end_orders(self) -> None:
        orders = [(rank, name) for rank in self.ranks for name in rank.orders]
        self._rng.shuffle(orders)
        for rank, name in orders:
            kind, number = name
            steps = self._rng.choice([0, 1, 3, SLOWEST])
            if self._due.setdefault((rank.number, *name), self.steps + steps) > self.steps:
                continue
            del self._due[rank.number, kind, number]
            outcome = Outcome.OK
            if kind == "fetch" and number in rank.cancelled:
                outcome = Outcome.CANCELLED
            elif self._rng.random() < self._failing:
                outcome = self._rng.choice(FATES.get(kind, [Outcome.FAILED]))
            rank.end(name, outcome)

    def _fail(self) -> None:
        """The step that has run is one whose output is an error (`EngineCoreSentinel.on_fault`, and
        then `retry`). Some ranks have reported, and the others do so after their next step."""
        self.seen["failed steps"] += 1
        told = [self._reported(rank) for rank in self.ranks if self._rng.random() < 0.7]
        self._rng.shuffle(told)
        self._aggregator.ft_defer_kv_connector_outputs(told)
        self.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)

    def _reported(self, rank: Any) -> KVConnectorOutput:
        report, ends = rank.take_report(), dict(rank.loaded)
        rank.loaded.clear()
        self._failed.update(name for name, ok in ends.items() if not ok)
        is_told = bool(report.ends) or report.number is not None
        return KVConnectorOutput(
            finished_recving=set(ends) or None,
            failed_recving={name for name, ok in ends.items() if not ok},
            kv_connector_worker_meta=WorkerReport(report) if is_told else None,
        )

    def _merged(self, *of_the_first: Any) -> ModelRunnerOutput:
        """The output of all ranks. of_the_first: the arguments of that of the first one."""
        outputs = [ModelRunnerOutput(*of_the_first)] + [
            ModelRunnerOutput([], {}) for _ in self.ranks[1:]
        ]
        for rank, output in zip(self.ranks, outputs, strict=True):
            output.kv_connector_output = self._reported(rank)
        return self._aggregator.aggregate(outputs)

    def _take_in(self, output: SchedulerOutput, sampling: set[str]) -> None:
        names = list(output.num_scheduled_tokens)
        places = {name: place for place, name in enumerate(names)}
        sampled = [[SAMPLED] if name in sampling else [] for name in names]
        self.scheduler.update_from_output(output, self._merged(names, places, sampled))

    def reset(self) -> None:
        """New weights, unless requests that do not run hold blocks: vLLM refuses then, and fails
        in the next step."""
        while self._outputs:
            self._take_in(*self._outputs.popleft())
        waiting = set(self.scheduler.requests) - {r.request_id for r in self.scheduler.running}
        if any(any(self.scheduler.kv_cache_manager.get_block_ids(name)) for name in waiting):
            return
        self.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        self._forget()
        self.weights += 100
        self.seen["resets"] += 1

    def _forget(self) -> None:
        """Forget the bucket, as our connector just has."""
        self._told.in_bucket.clear()

    @property
    def side(self) -> kv_scheduler.SchedulerSide:
        return self.connector._scheduler  # type: ignore[no-any-return]

    def check(self) -> None:
        """Everything has ended: nothing is held, and nothing of ours has broken."""
        assert self.side.broken is None
        check(self.side.planner)
        pinned = self.side.planner.ledger.table.statistics().pinned
        assert not pinned, f"{pinned} chunks are leased to nobody"
        free = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        assert free == self._blocks, f"{self._blocks - free} blocks are held for nobody"

    def described(self) -> str:
        """The requests and the jobs in flight, for a person."""
        free = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        lines = [f"step {self.steps}: {free} of {self._blocks} blocks are free"]
        for one in self.scheduler.requests.values():
            table, *_ = self.scheduler.kv_cache_manager.get_block_ids(one.request_id)
            tokens = f"{one.num_computed_tokens} of {one.num_tokens} tokens computed"
            lines.append(f"  {one.request_id}: {one.status.name}, {tokens}, {len(table)} blocks")
        orders = [f"{rank.number} {name}" for rank in self.ranks for name in rank.orders]
        return "\n".join([*lines, f"  in flight: {sorted(orders)}"])


def raise_again() -> None:
    """The guard of our connector lets an error pass that has come to it."""
    raise


def first_seen(spec: Any, token: int) -> int:
    """The first token that this one sees in the layers of a group."""
    window, local = (getattr(spec, n, None) for n in ("sliding_window", "attention_chunk_size"))
    return token - token % local if local else max(0, token - window + 1) if window else 0


def on_clock(
    monkeypatch: pytest.MonkeyPatch, engine: Engine, connector: Any = kv_scheduler
) -> Engine:
    """The engine, whose connector reads its virtual time. connector: the module that does."""
    clock = SimpleNamespace(monotonic=lambda: engine.now_s)
    monkeypatch.setattr(connector, "time", clock)
    return engine


def lives(life: Any, seeds: Iterable[int], *of: Any, **how: Any) -> Counter[str]:
    """How often what happens in these lives, each of which is `life(seed, *of, **how)`."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        try:
            seen += life(seed, *of, **how)
        except AssertionError as error:
            raise type(error)(f"seed {seed}: {error}") from error
    return seen
