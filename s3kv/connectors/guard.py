"""Guard of the engine: which errors reach it at start, that none does afterwards, when it pauses.

At start, a bucket that cannot be used may stop the engine (`wait_for_bucket`), as does a host with
too little memory for all ranks (`planned_slabs`). After that nothing raises into the engine. A hook
that fails is a bug of s3kv, and the engine must not die of it. So the side of the connector in
which it failed logs the error once, stops caching for good, and answers from then on as if it held
nothing (`guarded`). A worker's side tells the scheduler's, which then offers nothing.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from s3kv.config import Config
from s3kv.errors import IoProcessError, StoreError
from s3kv.host.limits import Plan
from s3kv.io.client import IoClient
from s3kv.io.tier import try_bucket

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput

logger = logging.getLogger("s3kv")

Hook = TypeVar("Hook", bound=Callable[..., Any])


class Guarded:
    """Base of both sides of a connector. `broken` names the hook that failed first, if any did."""

    broken: str | None = None

    def on_broken(self) -> None:
        """React to the first failed hook. Called once."""


def guarded(default: Callable[[], Any]) -> Callable[[Hook], Hook]:
    """Decorate a hook: it answers `default()` once any guarded hook of its object has failed."""

    def wrap(hook: Hook) -> Hook:
        @functools.wraps(hook)
        def safe(self: Guarded, *args: Any, **kwargs: Any) -> Any:
            if self.broken is not None:
                return default()
            try:
                return hook(self, *args, **kwargs)
            except Exception:
                self.broken = hook.__name__
                logger.exception(
                    "s3kv failed in %s and serves without its cache in this engine from now on. "
                    "This is a bug of s3kv: please report it with the traceback",
                    hook.__name__,
                )
                self.on_broken()
                return default()

        return cast(Hook, safe)

    return wrap


def planned_slabs(vllm_config: VllmConfig) -> Plan:
    """The slabs of both connectors that an engine's processes make on this worker's host.

    vLLM's world group, and so the number, includes the data-parallel ranks of a mixture of experts.
    vLLM runs those of other models as engines of their own, which do not know of each other.
    """
    from vllm.distributed.parallel_state import get_node_count, get_world_group

    kv, ec = vllm_config.kv_transfer_config, vllm_config.ec_transfer_config
    world, size = get_world_group(), vllm_config.parallel_config.world_size
    ranks = world.world_size // get_node_count()  # not more than there are, if hosts differ
    planned: list[tuple[int, int, str]] = []
    if kv is not None and kv.kv_connector == "S3KVConnector":
        config = Config.parse(kv.kv_connector_extra_config, "kv_connector_extra_config")
        planned.append((ranks, config.host_bytes, "host_bytes, per rank"))
    if ec is not None and ec.ec_connector == "S3ECConnector":
        config = Config.parse(ec.ec_connector_extra_config, "ec_connector_extra_config")
        engines = max(ranks // size, int(world.rank % size < ranks))  # with the first rank here
        planned += [
            (engines, config.host_bytes, "host_bytes of encoder outputs")
        ] * ec.is_ec_consumer
        planned += [(engines, config.staging_bytes, "staging_bytes")] * ec.is_ec_producer
    return tuple(planned)


def is_in_lockstep(vllm_config: VllmConfig) -> bool:
    """Whether other engines wait for every step of this one. vLLM's data-parallel ranks of a model
    with experts do, even if a rank has nothing to compute (`execute_dummy_batch`)."""
    is_parallel = vllm_config.parallel_config.data_parallel_size > 1
    return bool(is_parallel and vllm_config.model_config.is_moe)


class Linger:
    """Pauses of an idle engine whose requests wait for s3kv. Without them vLLM's loop polls every
    1.3 ms, and takes a third of a core from the I/O process.

    longest_s: length of a pause that no arrival ends. It delays a new request. in_lockstep: whether
    a pause would hold up other engines; then there is none."""

    def __init__(self, longest_s: float, *, in_lockstep: bool) -> None:
        self._longest_s = 0.0 if in_lockstep else longest_s
        self._was_idle = False

    def pause_s(self, output: SchedulerOutput, *, waits: bool) -> float:
        """The pause in the step of `output`. waits: whether a request waits for an arrival."""
        idle, was_idle = output.total_num_scheduled_tokens == 0, self._was_idle
        self._was_idle = idle
        # Two idle steps, because the previous one may still run while this one is planned.
        return self._longest_s if idle and was_idle and waits else 0.0


def wait_for_bucket(client: IoClient, config: Config) -> bool | None:
    """Wait until the I/O process has tried the bucket. Returns whether the namespace has objects;
    None if the bucket does not answer.

    Raises a `StoreError` if the bucket cannot be used and `on_unavailable` is "fail", and
    `IoProcessError` if the I/O process cannot be started or has died. The client is closed then.
    """
    try:
        return try_bucket(client, config)
    except (IoProcessError, StoreError) as error:
        said = f"s3kv: bucket {config.bucket!r} cannot be used: {error}"
        if isinstance(error, StoreError):
            said += (
                ". The engine does not start without it. With on_unavailable 'serve' it would "
                "start, and s3kv would keep trying"
            )
        told = type(error)(said)
        # Logged on a line of its own: vLLM repeats the error at the end of several tracebacks.
        logger.error("%s", told)
        raise told from error
