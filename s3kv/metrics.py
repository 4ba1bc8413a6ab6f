"""Table of every metric: its name, its meaning and its labels.

There is one table per connector, from which the metrics are registered, sent, summed and documented
(docs/metrics.md). An entry `name` is exported as `vllm:s3kv_<name>` (`vllm:s3kv_ec_<name>` by the
EC connector); Prometheus appends `_total` to a counter.

Between processes, a value is identified by its key: the name, then a bar and the value of each
label in the table's order, as in "io_requests|GET|2xx". The kind decides how values of several
ranks merge: counters are added, the observations of histograms are joined, and a gauge keeps its
last value. Only the scheduler reports gauges, so no two ranks report the same one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Literal, get_args

from s3kv.objects.compression import PLAIN_REASONS
from s3kv.objects.headers import Mismatch
from s3kv.planning.breaker import BreakerState
from s3kv.stores.traffic import ANSWERS, VERBS

Kind = Literal["counter", "gauge", "histogram"]

NAMESPACE = "vllm:s3kv_"
EC_NAMESPACE = "vllm:s3kv_ec_"

_WIRE_S = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Buckets from a first byte within the rack to `max_wait_ms`."""
_COPY_S = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. labels: each with all its possible values. buckets: a histogram's upper bounds.
    scale: the factor applied at export; between processes, the value is a whole number."""

    doc: str
    kind: Kind = "counter"
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    buckets: tuple[float, ...] = ()
    scale: float = 1.0

    def keys(self, name: str) -> tuple[str, ...]:
        """Every key that values of this metric can be filed under."""
        return tuple("|".join((name, *values)) for values in product(*self.labels.values()))


def name_of(key: str) -> str:
    """The name of the metric in a key."""
    return key.partition("|")[0]


def labels_of(key: str) -> tuple[str, ...]:
    """The values of the labels in a key, in the order of the table."""
    return tuple(key.split("|")[1:])


_REFUSED: Mapping[str, str] = {
    "length": "Objects that were shorter or longer than announced",
    "header": "Objects without a header s3kv could have written",
    "version": "Objects of another format version",
    "namespace": "Objects of another namespace under this one's keys",
    "coverage": "Objects of other KV-cache groups under these ones' keys",
    "shard": "Objects of another rank under this one's keys",
    "block_hash": "Objects of another chunk or item under this one's key",
    "blocks": "Objects of other blocks of the chunk",
    "tensors": "Objects with other tensors",
    "algorithm": "Objects sealed in another integrity mode",
    "digest": "Objects whose digest does not fit: damaged, or forged",
    "codec": "Compressed objects that this installation cannot decode: it has no blosc2",
    "encryption": "Encrypted objects that do not decrypt: moved, damaged or forged",
    "quarantined": "Objects not requested because they are known to be bad",
}
"""The parts of `fetch_corrupt` (`headers.Mismatch`). Not part of it, but also listed: the objects
without a codec, and the requests that the quarantine avoided."""

MISSES: Mapping[str, str] = {
    "fetch_missing": "absent",
    "fetches_spared": "known_absent",
    "fetch_corrupt": "corrupt",
    "fetch_denied": "denied",
    "fetch_failed": "failed",
    "fetch_invalid": "failed",
    "fetches_without_room": "memory_full",
    "fetches_refused_by_breaker": "breaker_open",
}
"""The planners' counters of chunks or items wanted but not served, and the reason for each."""

UNSAVED: Mapping[str, str] = {
    "saves_without_room": "memory_full",
    "saves_without_blocks": "blocks_gone",
    "saves_believed_present": "believed_present",
    "saves_doubtful": "doubtful",
}
"""The KV planner's counters of chunks computed but not saved, and the reason for each. The rest of
`saves_dropped` is "inflight"."""

TIER_UNSAVED: Mapping[str, str] = {
    "saves_refused_by_breaker": "breaker_open",
    "saves_after_reset": "reset",
}
"""The same for the tier's planner."""

_REASONS = tuple(dict.fromkeys(MISSES.values()))

_ENGINE: Mapping[str, Metric] = {
    "slab_pinned_bytes": Metric("Host memory that requests hold: not to be evicted.", "gauge"),
    "breaker": Metric(
        "1 for the state the circuit breaker is in, 0 for the others.",
        "gauge",
        {"state": tuple(state.value for state in BreakerState)},
    ),
    "io_requests": Metric(
        "Requests sent to the store, by verb and by class of the answer's status; none: no answer.",
        labels={"verb": VERBS, "status": ANSWERS},
    ),
    "io_received_bytes": Metric("Bytes of objects, or of parts of them, received from the store."),
    "io_sent_bytes": Metric("Bytes of objects written to the store."),
    "io_retries": Metric("Requests to the store sent again after they had failed."),
    "io_throttled": Metric("Answers of the store that throttle (SlowDown)."),
    "io_window_cuts": Metric("Times the limit on requests at once was lowered."),
    "io_hedges": Metric("Fetches sent a second time because their first byte was late."),
    "io_hedges_won": Metric("Fetches sent a second time whose second request was the faster."),
    "io_encoded": Metric("Objects compressed for their upload (compress)."),
    "io_encoded_bytes": Metric("Bytes of such objects before."),
    "io_encoded_stored_bytes": Metric("Bytes of such objects after."),
    "io_left_plain": Metric(
        "Objects uploaded plain although compress allows it: the bucket is nearly as fast as this "
        "host decodes; no thread or memory was free; they would not have been shorter.",
        labels={"reason": PLAIN_REASONS},
    ),
    "io_decoded": Metric("Compressed objects fetched and decoded."),
    "io_decoded_bytes": Metric("Bytes of such objects, decoded."),
    "io_decoded_stored_bytes": Metric("Bytes of such objects as they are in the bucket."),
    "io_disk_reads": Metric("Objects read from the disk (disk_path)."),
    "io_disk_read_bytes": Metric("Bytes of such objects."),
    "io_disk_writes": Metric("Objects written to the disk."),
    "io_disk_written_bytes": Metric("Bytes of such objects."),
    "io_disk_dropped": Metric(
        "Objects not written to the disk: it was behind, full or failing, or the engine ended."
    ),
    "io_disk_corrupt": Metric("Files that failed verification, and were deleted."),
    "io_disk_failed": Metric(
        "Reads and writes that the disk failed; there are no more of the kind for a minute then."
    ),
    "io_disk_evicted_bytes": Metric("Bytes of files deleted for disk_bytes."),
    "io_refresh_done": Metric("Objects in use that were rewritten in place."),
    "io_refresh_failed": Metric("Objects in use that could not be rewritten or read."),
    "io_refresh_skipped": Metric(
        "Objects in use that were not rewritten here: another replica did, or they were dropped."
    ),
    "io_cleaner_sweeps": Metric("Sweeps of the bucket for bucket_bytes and bucket_idle_s."),
    "io_cleaner_failed": Metric("Attempts at such sweeps, or at their lease, that failed."),
    "io_cleaner_deleted": Metric("Objects that such sweeps have deleted."),
    "io_cleaner_deleted_bytes": Metric("Bytes that such sweeps have deleted."),
    "io_restarts": Metric("I/O processes that died and were replaced."),
    "io_defects": Metric("Unforeseen errors inside an I/O process: bugs of s3kv."),
    "cost_usd": Metric(
        "Estimated cost of the requests in US dollars, at AWS's prices of the bucket's region.",
        scale=1e-9,
    ),
    "internal_errors": Metric("Bugs of s3kv that made it stop caching in this engine."),
}
"""The metrics that both connectors have with the same wording."""


def _fetches(what: str, per: str) -> dict[str, Metric]:
    return {
        "fetches": Metric(f"{what} requested from the bucket."),
        "fetch_ok": Metric(f"{what} that arrived and verified{per}."),
        "fetch_missing": Metric(f"{what} the bucket did not have{per}."),
        "fetch_corrupt": Metric(f"Objects that failed verification{per}."),
        **{f"fetch_corrupt_{r}": Metric(f"{doc}{per}.") for r, doc in _REFUSED.items()},
        "fetch_denied": Metric(f"Fetches refused without permission{per}."),
        "fetch_failed": Metric(f"Fetches that failed otherwise{per}."),
        "fetch_invalid": Metric(f"Fetches that can never work, and were not tried again{per}."),
        "fetch_cancelled": Metric(f"Fetches given up because no request waited any more{per}."),
        "fetch_bytes": Metric("Uncompressed bytes that arrived from bucket or disk and verified."),
        "fetch_seconds": _seconds(
            f"Time from the request for one of the {what.lower()} that arrived until it was "
            f"verified, including retries but not the wait for its turn{per}.",
            _WIRE_S,
        ),
        "fetches_spared": Metric(
            f"{what} not requested because the bucket did not have them a moment ago."
        ),
        "fetches_refused_by_breaker": Metric(
            f"{what} not requested because the store keeps failing."
        ),
        "fetches_without_room": Metric(f"{what} not requested because host memory was full."),
        "misses": Metric(
            f"{what} wanted from the bucket and not served, by reason, counted once for all "
            "ranks. breaker_open and memory_full: once for each lookup.",
            labels={"reason": _REASONS},
        ),
    }


def _seconds(doc: str, buckets: tuple[float, ...]) -> Metric:
    return Metric(doc, "histogram", buckets=buckets)


def _uploads(per: str) -> dict[str, Metric]:
    return {
        "upload_ok": Metric(f"Objects written{per}."),
        "upload_exists": Metric(f"Objects that were in the bucket already{per}."),
        "upload_denied": Metric(f"Uploads refused without permission{per}."),
        "upload_failed": Metric(f"Uploads that failed otherwise{per}."),
        "upload_invalid": Metric(f"Uploads that can never work, and were not tried again{per}."),
        "upload_bytes": Metric("Uncompressed bytes of objects written or found written."),
        "upload_seconds": _seconds(
            f"Time from the request to write an object to the store's answer that it has it, "
            f"retries included{per}.",
            _WIRE_S,
        ),
    }


KV_METRICS: Mapping[str, Metric] = {
    "hit_tokens_bucket": Metric("Prompt tokens from the bucket; again after a preemption."),
    "hit_tokens_host": Metric("Prompt tokens from host memory; again after a preemption."),
    "prefill_tokens_per_s": Metric(
        "Prompt tokens the engine computes per second; assumed until it has been measured.", "gauge"
    ),
    **_fetches("Chunks", ", per rank"),
    "deadline_cuts": Metric("Waits for the bucket that were cut short in favour of computing."),
    "requests_untrusted": Metric("Requests not cached because the content of media was uncertain."),
    "load_ok": Metric("Requests whose chunks were copied to the device, per rank."),
    "load_bytes": Metric("Bytes copied from host memory to the device."),
    "load_seconds": _seconds(
        "Time from the order to copy a request's chunks to the device to the step that found the "
        "copy done, per rank.",
        _COPY_S,
    ),
    "loads_failed": Metric("Requests whose copy to the device failed."),
    "saves": Metric("Chunks ordered saved."),
    "saves_dropped": Metric(
        "Chunks not saved. inflight: 256 were being uploaded. "
        "memory_full: every slot of host memory was in use. blocks_gone: the engine had given up "
        "blocks of the chunk. believed_present: the bucket had lost the chunk meanwhile. "
        "doubtful: a load of its request had failed, or the cache had been reset.",
        labels={"reason": ("inflight", *UNSAVED.values())},
    ),
    "unreadable_params": Metric(
        "Requests not saved because their kv_transfer_params could not be read."
    ),
    "save_ok": Metric("Chunks copied to host memory, per rank."),
    "save_failed": Metric("Chunks whose copy to host memory failed, per rank."),
    "save_bytes": Metric("Bytes copied from the device to host memory."),
    "save_seconds": _seconds(
        "Time from the order to copy a chunk to host memory to the step that found the copy done, "
        "per rank.",
        _COPY_S,
    ),
    **_uploads(", per rank"),
    "upload_cancelled": Metric("Uploads given up at shutdown or after a failed copy, per rank."),
    "uploads_given_up": Metric("Uploads of chunks given up after all tries."),
    "uploads_again": Metric(
        "Uploads ordered again because a chunk was hit after that, or after the bucket had lost it."
    ),
    "evictions": Metric("Chunks evicted from host memory."),
    "slab_bytes": Metric(
        "Host memory of all ranks by content. filling: being fetched or saved. dirty: not in "
        "the bucket yet.",
        "gauge",
        {"state": ("free", "filling", "clean", "dirty")},
    ),
    **_ENGINE,
}
"""The metrics of the KV connector. Every rank saves and fetches a chunk, so a metric "per rank"
counts each chunk once per rank. Of ranks that hold the same KV, only the first uploads."""

TIER_METRICS: Mapping[str, Metric] = {
    **{name: KV_METRICS[name] for name in ("prefill_tokens_per_s", "saves", "unreadable_params")},
    "deadline_cuts": Metric(
        "Waits for the bucket that were cut short in favour of computing, and lookups of chunks "
        "that such a wait had just given up."
    ),
    **_fetches("Chunks", ""),
    **_uploads(""),
    "upload_cancelled": Metric("Uploads given up at shutdown or at a reset."),
    "saves_dropped": Metric(
        "Chunks not saved. inflight: too many were being uploaded. breaker_open: the store keeps "
        "failing. reset: their request began before the cache was reset.",
        labels={"reason": ("inflight", *TIER_UNSAVED.values())},
    ),
    **{name: metric for name, metric in _ENGINE.items() if name != "slab_pinned_bytes"},
}
"""The metrics of the tier in vLLM's offloading, under the names of the KV connector."""

EC_METRICS: Mapping[str, Metric] = {
    "hits": Metric("Encoder outputs loaded instead of encoded."),
    "hit_rows": Metric("Embeddings in the encoder outputs loaded."),
    "hit_rows_bucket": Metric("Embeddings loaded, fetched from the bucket for the purpose."),
    "hit_rows_host": Metric("Embeddings loaded, in host memory already."),
    "encoded": Metric("Encoder outputs that were encoded here."),
    "encoded_rows": Metric("Embeddings in the encoder outputs encoded here."),
    **_fetches("Items", ""),
    "deadline_cuts": Metric("Waits for the bucket that were cut short in favour of encoding."),
    "load_ok": Metric("Items copied to the device."),
    "load_bytes": Metric("Bytes copied from host memory to the device."),
    "load_seconds": _seconds("Time an item's copy to the device takes.", _COPY_S),
    "saves": Metric("Items ordered saved."),
    "saves_dropped": Metric(
        "Items not saved. memory_full: too many were being uploaded (host_bytes).",
        labels={"reason": ("memory_full",)},
    ),
    "saves_unfit": Metric("Items not saved because their shape or dtype was not the one expected."),
    "save_ok": Metric("Items copied to host memory."),
    "save_bytes": Metric("Bytes copied from the device to host memory."),
    "save_seconds": _seconds(
        "Time from the order to copy an item to host memory until it was there.", _COPY_S
    ),
    **_uploads(""),
    "uploads_again": Metric("Uploads ordered again because the bucket had lost an item in use."),
    "upload_cancelled": Metric("Uploads given up at shutdown."),
    "items_too_large": Metric("Items larger than 64 MiB or host memory."),
    "items_untrusted": Metric("Items left alone because their content was unknown."),
    "evictions": Metric("Items evicted from host memory."),
    "slab_bytes": Metric(
        "Host memory of the scheduler's side by content. filling: being fetched. dirty: gone "
        "from the bucket, and being uploaded again.",
        "gauge",
        {"state": ("free", "filling", "clean", "dirty")},
    ),
    **_ENGINE,
}
"""The metrics of the EC connector. Encoder outputs are the same on all ranks; only one counts."""

assert set(_REFUSED) == {*get_args(Mismatch), "quarantined"}
