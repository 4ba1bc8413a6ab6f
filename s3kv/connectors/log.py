"""s3kv's lines in vLLM's log: their format, the line of a start, and the line of a minute.

vLLM configures the logger `vllm` and no other. `join_vllm_log` hands s3kv's lines to it, so that
they have the same time, level and process. `TrafficLine` decides from counts and the time.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from s3kv import __version__
from s3kv.config import Config, count, size
from s3kv.connectors.kv_translate import WorkerHandshake
from s3kv.messages import JobKind, StepReport
from s3kv.planning.breaker import BreakerState
from s3kv.planning.ec import ECPlanner
from s3kv.planning.group_kinds import Coverage
from s3kv.planning.kv import KVPlanner
from s3kv.types import ENGINE_LOG

logger = logging.getLogger("s3kv")

INTERVAL_S = 60.0
"""Least time between two lines on traffic. vLLM logs its own every 10 s, for every engine."""

_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
_BUCKET = {
    BreakerState.CLOSED: "answers",
    BreakerState.OPEN: "fails, not asked for now",
    BreakerState.HALF_OPEN: "fails, being tried",
}


class _VllmHandler(logging.Handler):
    """Handler that passes records on to vLLM's logger, whatever handlers that has by then."""

    def emit(self, record: logging.LogRecord) -> None:
        logging.getLogger("vllm").handle(record)


def join_vllm_log() -> None:
    """Log the lines of the logger `s3kv` as vLLM logs its own. Idempotent.

    Does nothing if somebody has configured the logger `s3kv`, for example by
    VLLM_LOGGING_CONFIG_PATH.
    """
    ours = logging.getLogger("s3kv")
    if ours.handlers or ours.level != logging.NOTSET:
        return
    ours.addHandler(_VllmHandler())
    ours.setLevel(logging.getLogger("vllm").getEffectiveLevel())
    ours.propagate = False


def leave_to_first_rank(rank: int) -> None:
    """Log what all ranks would log alike in one of them only: not in this one, unless it is 0."""
    logging.getLogger(ENGINE_LOG).setLevel(logging.WARNING if rank else logging.NOTSET)


def start_line(
    config: Config,
    handshakes: Sequence[WorkerHandshake],
    coverages: Sequence[Coverage],
    *,
    may_load: bool,
    may_save: bool,
) -> tuple[int, str]:
    """Level and text of the scheduler's line when all ranks are ready. It is a warning if the GPU's
    driver did not pin all host memory."""
    memory = sum(handshake.slot_count * handshake.slot_bytes for handshake in handshakes)
    novelty = _novelty({handshake.known for handshake in handshakes})
    pinned = {handshake.pinned for handshake in handshakes}  # None: no GPU
    is_slow, kind = False in pinned, "pinned " if pinned == {True} else ""
    note = ", not all of it pinned (copies to and from the GPU are slower)" if is_slow else ""
    return logging.WARNING if is_slow else logging.INFO, (
        f"{_whereabouts(config, may_load=may_load, may_save=may_save)}: "
        f"namespace {handshakes[0].namespace} ({novelty}), {size(memory)} of {kind}host "
        f"memory on {count(len(handshakes), 'rank')}{note}, "
        f"chunks of {coverages[0].chunk_tokens} tokens, "
        f"KV of {' and '.join(dict.fromkeys(str(c.kind) for c in coverages))}"
    )


def encoder_start_line(
    config: Config, namespace: str, known: bool | None, nbytes: int, *, may_save: bool
) -> str:
    """The same for encoder outputs, which the scheduler's own slab of `nbytes` holds.

    known: whether the namespace has objects; None if the bucket does not answer."""
    return (
        f"{_whereabouts(config, may_load=True, may_save=may_save)}: "
        f"namespace {namespace} ({_novelty({known})}), {size(nbytes)} of host memory, "
        "encoder outputs"
    )


def _whereabouts(config: Config, *, may_load: bool, may_save: bool) -> str:
    does = " and ".join(["reads"] * may_load + ["writes"] * may_save) or "only looks at"
    named = [config.endpoint_url, *(os.environ.get(name) for name in _ENDPOINTS)]
    endpoint = next(filter(None, named), "the default endpoint")
    return f"s3kv {__version__} {does} bucket {config.bucket} under {config.prefix}/ at {endpoint}"


def _novelty(answers: set[bool | None]) -> str:
    """answers: whether the namespace has objects, as each rank found it."""
    # One rank may see what another has just written, so the namespace is new if it is to any.
    if False in answers:
        return "new"
    return "known" if answers == {True} else "the bucket does not answer yet"


_COUNTERS = ("hit_tokens_bucket", "hit_tokens_host", "deadline_cuts", "saves_dropped")
_ENCODER_COUNTERS = (
    "hit_rows_bucket",
    "hit_rows_host",
    "encoded_rows",
    "fetch_bytes",
    "upload_bytes",
    "deadline_cuts",
    "saves_dropped",
)


def _is_due(said_s: float | None, now_s: float, finished: str | None) -> bool:
    return finished is not None if said_s is None else now_s - said_s >= INTERVAL_S


def _grown(
    counters: Mapping[str, int], before: Mapping[str, int], names: Sequence[str]
) -> dict[str, int]:
    return {name: counters.get(name, 0) - before.get(name, 0) for name in names}


@dataclass(slots=True)
class _Minute:
    """What has happened since the last line."""

    computed_tokens: int = 0
    fetched_bytes: int = 0
    uploaded_bytes: int = 0
    waits: int = 0
    waited_s: float = 0.0
    counters: dict[str, int] = field(default_factory=dict)
    """The planner's counters at the beginning."""


class TrafficLine:
    """Line on the traffic of a minute, for the scheduler's log. Used from one thread; the caller
    passes the time.

    The first line is due as soon as a request has finished, every other after `INTERVAL_S`. An
    engine without steps logs nothing, so a line may be on more than a minute.
    """

    def __init__(self) -> None:
        self._minute = _Minute()
        self._said_s: float | None = None
        self._waiting: dict[str, float] = {}
        """Beginning of the wait of each request that waits."""
        self._prompts: dict[str, int] = {}
        """Tokens of each request that has been looked up and not scheduled."""

    def looked_up(self, request_id: str, tokens: int, now_s: float, *, waits: bool) -> None:
        """Note the answer to the lookup of a request of so many tokens: whether it waits."""
        self._prompts[request_id] = tokens
        if waits:
            self._waiting.setdefault(request_id, now_s)
        else:
            self._end_wait(request_id, now_s)

    def scheduled(self, request_id: str, computed_tokens: int) -> None:
        """Note that the engine computes a request from here on. A second call does nothing."""
        tokens = self._prompts.pop(request_id, computed_tokens)
        self._minute.computed_tokens += tokens - computed_tokens

    def _end_wait(self, request_id: str, now_s: float) -> None:
        since_s = self._waiting.pop(request_id, None)
        if since_s is not None:
            self._minute.waits += 1
            self._minute.waited_s += now_s - since_s

    def reported(self, report: StepReport) -> None:
        """Note the bytes of the jobs that have ended."""
        for end in report.ends.values():
            if end.kind is JobKind.FETCH:
                self._minute.fetched_bytes += end.nbytes
            elif end.kind is JobKind.UPLOAD:
                self._minute.uploaded_bytes += end.nbytes

    def line(
        self,
        counters: Mapping[str, int],
        bucket: BreakerState,
        now_s: float,
        *,
        finished: str | None = None,
    ) -> str | None:
        """The line, if one is due and something has happened. Then the next minute begins.

        counters: the planner's. finished: the request that has just finished.
        """
        if finished is not None:
            self._end_wait(finished, now_s)
            self._prompts.pop(finished, None)
        if not _is_due(self._said_s, now_s, finished):
            return None
        minute = self._minute
        grown = _grown(counters, minute.counters, _COUNTERS)
        happened = (minute.computed_tokens, minute.fetched_bytes, minute.uploaded_bytes)
        if not any((*happened, minute.waits, *grown.values())):
            return None
        self._said_s, self._minute = now_s, _Minute(counters=dict(counters))
        return _told(minute, grown, _BUCKET[bucket])


def _told(minute: _Minute, grown: Mapping[str, int], bucket: str) -> str:
    hits = grown["hit_tokens_bucket"] + grown["hit_tokens_host"]
    share = hits / max(1, hits + minute.computed_tokens)
    mean_s = minute.waited_s / max(1, minute.waits)
    parts = [
        f"Hit rate: {share:.1%} (bucket: {count(grown['hit_tokens_bucket'], 'token')}, "
        f"host memory: {count(grown['hit_tokens_host'], 'token')}, "
        f"computed: {count(minute.computed_tokens, 'token')})",
        f"Fetched: {size(minute.fetched_bytes)}",
        f"Uploaded: {size(minute.uploaded_bytes)}",
        f"Waits: {minute.waits:,} (mean: {mean_s:.2f} s, cut short: {grown['deadline_cuts']:,})",
        f"Bucket: {bucket}",
    ]
    if grown["saves_dropped"]:
        parts.append(f"Chunks not saved: {grown['saves_dropped']:,}")
    return f"s3kv: {', '.join(parts)}"


class EncoderTrafficLine:
    """The same line on encoder outputs, whose planner counts all that it says. A line is due as in
    `TrafficLine`.
    """

    def __init__(self) -> None:
        self._before: dict[str, int] = {}
        self._said_s: float | None = None

    def line(
        self,
        counters: Mapping[str, int],
        bucket: BreakerState,
        now_s: float,
        *,
        finished: str | None = None,
    ) -> str | None:
        """The line, if one is due and something has happened. Parameters as of `TrafficLine`."""
        if not _is_due(self._said_s, now_s, finished):
            return None
        grown = _grown(counters, self._before, _ENCODER_COUNTERS)
        if not any(grown.values()):
            return None
        self._said_s, self._before = now_s, dict(counters)
        return _encoder_told(grown, _BUCKET[bucket])


def _encoder_told(grown: Mapping[str, int], bucket: str) -> str:
    hits = grown["hit_rows_bucket"] + grown["hit_rows_host"]
    parts = [
        f"Encoder outputs: Hit rate: {hits / max(1, hits + grown['encoded_rows']):.1%} "
        f"(bucket: {count(grown['hit_rows_bucket'], 'embedding')}, "
        f"host memory: {count(grown['hit_rows_host'], 'embedding')}, "
        f"encoded: {count(grown['encoded_rows'], 'embedding')})",
        f"Fetched: {size(grown['fetch_bytes'])}",
        f"Uploaded: {size(grown['upload_bytes'])}",
        f"Waits cut short: {grown['deadline_cuts']:,}",
        f"Bucket: {bucket}",
    ]
    if grown["saves_dropped"]:
        parts.append(f"Items not saved: {grown['saves_dropped']:,}")
    return f"s3kv: {', '.join(parts)}"


def log_traffic(
    traffic: TrafficLine | EncoderTrafficLine,
    planner: KVPlanner | ECPlanner,
    now_s: float,
    *,
    finished: str | None = None,
) -> None:
    """Log the line on the traffic, if one is due. finished: the request that has just finished."""
    bucket = planner.ledger.breaker.state
    line = traffic.line(planner.counters, bucket, now_s, finished=finished)
    if line is not None:
        logger.info("%s", line)
