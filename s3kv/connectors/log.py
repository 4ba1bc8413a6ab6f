"""s3kv's lines in vLLM's log: their format, the line at start, and the line per minute.

vLLM configures only the logger `vllm`. `join_vllm_log` hands s3kv's lines to it, so they show time,
level and process in the same way. `TrafficLine` decides from counters and the time.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import ClassVar

from s3kv import __version__
from s3kv.config import Config, count, size
from s3kv.connectors.kv_translate import WorkerHandshake
from s3kv.messages import JobKind, StepReport
from s3kv.planning.breaker import BreakerState
from s3kv.planning.group_kinds import Coverage
from s3kv.types import ENGINE_LOG

logger = logging.getLogger("s3kv")

INTERVAL_S = 60.0
"""Least time between two lines on traffic. vLLM logs its own every 10 s, for every engine."""

_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
_TRAFFIC = ("fetch_bytes", "upload_bytes", "saves_dropped", "waits", "waited_ms", "deadline_cuts")
_BUCKET = {
    BreakerState.CLOSED: "answers",
    BreakerState.OPEN: "down (circuit open)",
    BreakerState.HALF_OPEN: "being retried (circuit half-open)",
}


class _VllmHandler(logging.Handler):
    """Handler that passes records on to vLLM's logger and to the handlers it has at that time."""

    def emit(self, record: logging.LogRecord) -> None:
        logging.getLogger("vllm").handle(record)


def join_vllm_log() -> None:
    """Log the lines of the logger `s3kv` as vLLM logs its own. Idempotent. Does nothing if the
    logger `s3kv` is already configured, for example by VLLM_LOGGING_CONFIG_PATH."""
    ours = logging.getLogger("s3kv")
    if ours.handlers or ours.level != logging.NOTSET:
        return
    ours.addHandler(_VllmHandler())
    ours.setLevel(logging.getLogger("vllm").getEffectiveLevel())
    ours.propagate = False


def leave_to_first_rank(rank: int) -> None:
    """Restrict lines that all ranks would log alike to rank 0: others log only warnings."""
    logging.getLogger(ENGINE_LOG).setLevel(logging.WARNING if rank else logging.NOTSET)


def start_line(
    config: Config,
    handshakes: Sequence[WorkerHandshake],
    coverages: Sequence[Coverage] = (),
    *,
    may_load: bool,
    may_save: bool,
    content: str = "encoder outputs",
) -> tuple[int, str]:
    """Level and text of the scheduler's line when all ranks are ready. It is a warning if the GPU's
    driver did not pin all host memory. coverages: those of the KV; without them, the noun
    for the cached objects is `content`."""
    does = " and ".join(["reads"] * may_load + ["writes"] * may_save) or "neither reads nor writes"
    named = [config.endpoint_url, *(os.environ.get(name) for name in _ENDPOINTS)]
    endpoint = next(filter(None, named), "the default endpoint")
    known = {handshake.known for handshake in handshakes}
    novelty = "known" if known == {True} else "the bucket does not answer yet"
    # A rank may find objects that another has just written, so one "new" makes the namespace new.
    novelty = "new" if False in known else novelty
    memory = sum(handshake.slot_count * handshake.slot_bytes for handshake in handshakes)
    pinned = {handshake.pinned for handshake in handshakes}  # None: no GPU
    is_slow, kind = False in pinned, "pinned " if pinned == {True} else ""
    note = ", not all of it pinned (copies to and from the GPU are slower)" if is_slow else ""
    content = f", {content}"
    # With several coverages an object takes several slots, and the future mix is unknown.
    chunks = "chunks" if len(coverages) > 1 else count(handshakes[0].slot_count, "chunk")
    if coverages:
        content = (
            f" on {count(len(handshakes), 'rank')}{note}, "
            f"{chunks} of {coverages[0].chunk_tokens} tokens, "
            f"KV of {' and '.join(dict.fromkeys(str(c.kind) for c in coverages))}"
        )
    return logging.WARNING if is_slow else logging.INFO, (
        f"s3kv {__version__} {does} bucket {config.bucket} under {config.prefix}/ at {endpoint}: "
        f"namespace {handshakes[0].namespace} ({novelty}), {size(memory)} of {kind}host memory"
        f"{content}"
    )


class TrafficLine:
    """Line on the traffic of a minute, for the scheduler's log. Used from one thread; the caller
    passes the time.

    The first line is due as soon as a request has finished, every other after `INTERVAL_S`. An
    engine without steps logs nothing, so a line may cover more than a minute.
    """

    hits: ClassVar[tuple[str, str, str]]
    """Names of the counters of bucket hits, host memory hits, and computed units."""
    words: ClassVar[tuple[str, str, str, str]]
    """The title, the unit of the hits, the verb for computing, and the noun for objects."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        """Counters in addition to the planner's."""
        self._before: Mapping[str, int] = {}
        self._logged_s: float | None = None

    def line(
        self,
        counters: Mapping[str, int],
        bucket: BreakerState,
        now_s: float,
        *,
        finished: bool = False,
    ) -> str | None:
        """The line, if one is due and something has happened. Then the next minute begins.

        counters: the planner's. finished: whether a request has just finished.
        """
        is_due = finished if self._logged_s is None else now_s - self._logged_s >= INTERVAL_S
        if not is_due:
            return None
        total = {**counters, **self.counts}
        grown = {n: total.get(n, 0) - self._before.get(n, 0) for n in (*self.hits, *_TRAFFIC)}
        if not any(grown.values()):
            return None
        self._logged_s, self._before = now_s, total
        dropped = grown["saves_dropped"]
        unsaved = f", {self.words[3]} not saved: {dropped:,}" if dropped else ""
        return (
            f"s3kv: {self._hits(grown)}, "
            f"Fetched: {size(grown['fetch_bytes'])}, Uploaded: {size(grown['upload_bytes'])}, "
            f"{self._waits(grown)}, Bucket: {_BUCKET[bucket]}{unsaved}"
        )

    def _hits(self, grown: Mapping[str, int]) -> str:
        title, unit, verb, _ = self.words
        held, kept, computed = (grown[name] for name in self.hits)
        share = (held + kept) / max(1, held + kept + computed)
        return (
            f"{title}Hit rate: {share:.1%} (bucket: {count(held, unit)}, "
            f"host memory: {count(kept, unit)}, {verb}: {count(computed, unit)})"
        )

    def _waits(self, grown: Mapping[str, int]) -> str:
        return f"Waits cut short: {grown['deadline_cuts']:,}"


class EncoderTraffic(TrafficLine):
    """The line on encoder outputs."""

    hits = ("hit_rows_bucket", "hit_rows_host", "encoded_rows")
    words = ("Encoder outputs: ", "embedding", "encoded", "Items")


class TierTraffic(TrafficLine):
    """The line on the tier, whose hits are in vLLM's own lines."""

    hits = ("fetch_ok", "fetch_missing", "saves")
    words = ("", "chunk", "", "Chunks")

    def _hits(self, grown: Mapping[str, int]) -> str:
        fetched, absent, saved = (grown[name] for name in self.hits)
        return f"Chunks fetched: {fetched:,}, absent: {absent:,}, saved: {saved:,}"


class PromptTraffic(TrafficLine):
    """The line on prompts, whose waits and bytes are counted here."""

    hits = ("hit_tokens_bucket", "hit_tokens_host", "computed_tokens")
    words = ("", "token", "computed", "Chunks")

    def __init__(self) -> None:
        super().__init__()
        self._waiting: dict[str, float] = {}
        """Start of the wait of each waiting request."""
        self._prompts: dict[str, int] = {}
        """Tokens of each request that has been looked up and not scheduled."""

    def looked_up(self, request_id: str, tokens: int, now_s: float, *, waits: bool) -> None:
        """Record the result of the lookup of a request of `tokens` tokens: whether it waits."""
        self._prompts[request_id] = tokens
        if waits:
            self._waiting.setdefault(request_id, now_s)
        else:
            self._end_wait(request_id, now_s)

    def scheduled(self, request_id: str, computed_tokens: int) -> None:
        """Record that the engine begins to compute a request. A second call does nothing."""
        tokens = self._prompts.pop(request_id, computed_tokens)
        self.counts["computed_tokens"] += tokens - computed_tokens

    def finished(self, request_id: str, now_s: float) -> None:
        """Forget a request. If it waits, its wait ends now."""
        self._end_wait(request_id, now_s)
        self._prompts.pop(request_id, None)

    def _end_wait(self, request_id: str, now_s: float) -> None:
        if (since_s := self._waiting.pop(request_id, None)) is not None:
            self.counts["waits"] += 1
            self.counts["waited_ms"] += round(1000 * (now_s - since_s))

    def reported(self, report: StepReport) -> None:
        """Note the bytes of the jobs that have ended."""
        for end in report.ends.values():
            if end.kind in (JobKind.FETCH, JobKind.UPLOAD):
                self.counts[f"{end.kind.value}_bytes"] += end.nbytes

    def _waits(self, grown: Mapping[str, int]) -> str:
        mean_s = grown["waited_ms"] / 1000 / max(1, grown["waits"])
        cut = grown["deadline_cuts"]
        return f"Waits: {grown['waits']:,} (mean: {mean_s:.2f} s, cut short: {cut:,})"


def warn_of_uploads_left(left: int, noun: str, drain_timeout_s: float) -> None:
    """Log that `left` uploads did not end in time, if there are any."""
    if left:
        text = "s3kv: not in the bucket, because drain_timeout_s=%g was too short: %s"
        logger.warning(text, drain_timeout_s, count(left, noun))


def warn_of_weak_hashes(algorithm: str) -> None:
    """Log a warning if clients can construct different prompts with one block hash."""
    if algorithm.startswith("xxhash"):
        logger.warning(
            "s3kv: prefix_caching_hash_algo is %r. Clients can make prompts collide: one is then "
            "answered with another's KV. If not all clients are trusted, use sha256 or sha256_cbor",
            algorithm,
        )
