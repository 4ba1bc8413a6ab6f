"""Translation between vLLM and s3kv for KV: which models are served, their sizes, their steps, and
the messages that vLLM carries between scheduler and workers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from s3kv.config import Config
from s3kv.connectors.adapter_loads import NO_STEP, AdapterReport, AdapterStep
from s3kv.connectors.kv_groups import (
    block_tokens,
    check_groups_are_served,
    check_prefixes_suffice,
    chunk_tokens_for,
    coverages,
)
from s3kv.connectors.linger import is_in_lockstep
from s3kv.errors import ConfigError, UnsupportedError
from s3kv.messages import StepPlan, StepReport
from s3kv.planning.group_kinds import Coverage
from s3kv.planning.requests import ScheduledRequest

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """Sizes of blocks, block hashes and chunks, in tokens, and the coverages; equal on every rank.

    block_tokens: the least number of tokens that is a whole number of blocks in every group.
    """

    block_tokens: int
    hash_tokens: int
    chunk_tokens: int
    coverages: tuple[Coverage, ...]

    @property
    def is_plain(self) -> bool:
        """Whether there is one group, whose tables only grow."""
        (first, *others) = self.coverages
        return not others and len(first.members) == 1 and first.kind.is_cumulative


def check_supported(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Raise `UnsupportedError` for a model or engine that s3kv cannot serve correctly."""
    check_prefixes_suffice(vllm_config, kv_cache_config)
    check_groups_are_served(vllm_config, kv_cache_config)
    parallel = vllm_config.parallel_config
    for setting in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, setting) > 1:
            raise UnsupportedError(f"{setting} > 1 cannot be served yet")
    if parallel.enable_fault_tolerance:  # a rank would never end the copies of a plan it has lost
        raise UnsupportedError("enable_fault_tolerance cannot be served: failed steps leak memory")
    check_steps_end_whole(vllm_config)
    check_hashes_are_stable(vllm_config)


def check_steps_end_whole(vllm_config: VllmConfig) -> None:
    """Raise `UnsupportedError` if experts may skip a rank that does not answer. vLLM then detects
    it after the step, when its KV has been saved."""
    parallel = vllm_config.parallel_config
    leaves_out = parallel.enable_fault_tolerance or parallel.all2all_backend == "nixl_ep"
    if leaves_out and is_in_lockstep(vllm_config):
        raise UnsupportedError(
            "enable_fault_tolerance, or all2all_backend nixl_ep, cannot be served with data "
            "parallelism of a model with experts: KV of a step that lost a rank would be saved"
        )


def writes_around_fences(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, sizes: KVGeometry
) -> tuple[bool, bool]:
    """Whether a step may write to blocks before it calls `handle_preemptions`, which sets fences,
    and whether it may write to the blocks of its loads between that call and its forward.

    The second-generation model runner does the first, and the first-generation one the second, in
    two cases: they zero new blocks if layers have different precisions, and they copy the block in
    which a partial hit ends if hashes are finer than blocks.
    """
    writes = kv_cache_config.needs_kv_cache_zeroing or sizes.hash_tokens < sizes.block_tokens
    second_runner = vllm_config.use_v2_model_runner
    return writes and second_runner, writes and not second_runner


def check_hashes_are_stable(vllm_config: VllmConfig) -> None:
    """Raise `ConfigError` if the block hashes differ between processes. vLLM's own function returns
    the seed; a random seed changes with each call."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed

    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    function = get_hash_fn_by_name(algorithm)
    if resolve_none_hash_seed(function) != resolve_none_hash_seed(function):
        raise ConfigError(
            f"prefix_caching_hash_algo is {algorithm!r}, which vLLM seeds at random in every "
            "process. So no process could find the chunks of another. Set "
            "PYTHONHASHSEED to the same number on all instances, or use sha256_cbor"
        )


def geometry(config: Config, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> KVGeometry:
    """The KV geometry. Raises `ConfigError` if chunk_tokens does not fit the block size."""
    block = block_tokens(kv_cache_config)
    hashed = getattr(kv_cache_config, "hash_block_size", None)  # vLLM 0.32 and later
    if hashed is None:
        from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

        hashed = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)[1]
    chunk = config.chunk_tokens or chunk_tokens_for(kv_cache_config)
    if chunk % block or chunk % hashed:
        below = chunk // block * block
        near = f"{below} or {below + block}" if below else f"{block}"
        sizes = sorted({g.kv_cache_spec.block_size for g in kv_cache_config.kv_cache_groups})
        of = f", the least common multiple of {sizes}" if len(sizes) > 1 else ""
        raise ConfigError(
            f"chunk_tokens is {chunk}: allowed is a multiple of the KV block size, which is "
            f"{block} tokens here{of} (for example {near})"
        )
    return KVGeometry(block, hashed, chunk, coverages(kv_cache_config, chunk))


def scheduled_requests(output: SchedulerOutput, sizes: KVGeometry) -> Iterator[ScheduledRequest]:
    """The requests of one engine step. A request that was preempted comes back as a new request on
    the second-generation model runner, and as a resumed one on the first. Its blocks are replaced
    in both cases."""
    tokens, plain = output.num_scheduled_tokens, sizes.is_plain
    tables = None if plain else output.kv_connector_block_state.get_block_ids
    states = {} if plain else _states_within(output, sizes)
    fresh, cached = output.scheduled_new_reqs, output.scheduled_cached_reqs
    replaced = {new.req_id for new in fresh} | cached.resumed_req_ids
    rows = [(new.req_id, new.block_ids, new.num_computed_tokens) for new in fresh]
    rows += zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
    for request_id, blocks, computed in rows:
        yield ScheduledRequest(
            request_id,
            blocks or (),
            request_id in replaced,
            computed,
            tokens[request_id],
            None if tables is None else partial(tables, request_id),
            states.get(request_id, ()),
        )


def _states_within(output: SchedulerOutput, sizes: KVGeometry) -> dict[str, list[int]]:
    """By request: the numbers of tokens after which the engine reports every state in a full block.
    Some kernels write states within a step, not only at its end."""
    sparse = [coverage for coverage in sizes.coverages if coverage.kind.is_sparse]
    reported = output.kv_connector_block_state.boundary_state_offloads if sparse else {}
    found: dict[str, list[int]] = {}
    for request_id in reported.keys() & output.num_scheduled_tokens.keys():
        tables = output.kv_connector_block_state.get_block_ids(request_id)
        entries = reported[request_id]
        for tokens in {tokens for _, _, tokens in entries if tokens % sizes.block_tokens == 0}:
            needed = {
                (member, tables[member][tokens // coverage.block_tokens - 1], tokens)
                for coverage in sparse
                for member in coverage.members
            }
            if needed.issubset(entries):
                found.setdefault(request_id, []).append(tokens)
    return found


def written_blocks(output: SchedulerOutput) -> tuple[frozenset[int], frozenset[int]]:
    """Blocks that the engine writes to before the forward, and those of them that it copies to; it
    zeroes the others. All belong to scheduled requests or loads; listed again to be safe."""
    copied = frozenset(copy.dst_block_id for copy in output.kv_cache_block_copies or ())
    return copied.union(output.new_block_ids_to_zero or ()), copied


@dataclass(frozen=True, slots=True)
class PlanMetadata(KVConnectorMetadata):
    """The plan of a step, from the scheduler to every worker."""

    plan: StepPlan
    step: AdapterStep = NO_STEP


@dataclass(frozen=True, slots=True)
class WorkerHandshake(KVConnectorHandshakeMetadata):
    """A worker's message to the scheduler when it is ready to serve. A worker sends one.

    object_bytes: the length of a chunk's object in each coverage; empty if there is only one: then
    an object takes one slot. pinned: whether all host memory is pinned; None without a GPU.
    known: whether the namespace has objects; None if the bucket has not answered.
    """

    namespace: str
    slot_count: int
    slot_bytes: int
    object_bytes: tuple[int, ...] = ()
    pinned: bool | None = None
    known: bool | None = None


@dataclass(slots=True)
class WorkerReport(KVConnectorWorkerMetadata):
    """The workers' report to the scheduler. vLLM merges the reports of all ranks into one.

    handshakes: those that vLLM did not collect before the first step. adapters: None without LoRA.
    broken: a worker has failed, and would fail every load.
    """

    report: StepReport
    handshakes: tuple[WorkerHandshake, ...] = ()
    adapters: AdapterReport | None = None
    broken: bool = False

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, WorkerReport)
        self.report.merge(other.report)
        self.handshakes += other.handshakes
        self.broken |= other.broken
        if self.adapters is not None and other.adapters is not None:
            self.adapters.merge(other.adapters)
        else:
            self.adapters = None
        return self
