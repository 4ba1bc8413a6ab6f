"""Every setting of s3kv, parsed once and then frozen.

The keys are those of `kv_connector_extra_config`, and of `ec_connector_extra_config`: the one
class serves both connectors. `Config.parse` refuses what it does not know
and says which setting is wrong, what it was, and what is allowed. Nothing else in the package
reads settings or environment variables (botocore reads its own for credentials and region).
The one secret there is, that of `integrity`, is never a field: it is read where it is needed.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from s3kv.errors import ConfigError
from s3kv.fields import check, convert, setting
from s3kv.prices import TABLE

SECRET_VARIABLE = "S3KV_INTEGRITY_SECRET"
"""The environment variable that holds the secret of `integrity` where no file does."""
_SECRET_MIN_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The settings of one engine. Immutable; safe to pickle and to send to other processes."""

    bucket: str = setting(doc="Name of the bucket. It must exist.", kind="text")
    prefix: str = setting(
        "s3kv", doc="All keys start with this, so that one bucket can hold more.", kind="text"
    )
    region: str | None = setting(
        None, doc="AWS region; otherwise what botocore's own chain finds.", kind="text"
    )
    endpoint_url: str | None = setting(
        None,
        doc="URL of an S3-compatible server; otherwise AWS_ENDPOINT_URL or AWS itself.",
        kind="text",
    )
    addressing_style: str = setting(
        "auto",
        doc="Bucket in the path or in the host name. auto: path when an endpoint is given.",
        kind="text",
        choices=("auto", "path", "virtual"),
    )
    ca_bundle: str | None = setting(
        None, doc="File of certificate authorities to trust instead of the system's.", kind="text"
    )
    verify_tls: bool = setting(
        True, doc="Verify the server's certificate. Turn off only in a laboratory.", kind="flag"
    )
    checksum: str = setting(
        "when_required",
        doc="Request checksums: many S3-compatible servers reject when_supported.",
        kind="text",
        choices=("when_required", "when_supported"),
    )
    pool_size: int = setting(
        64, doc="Connections to the store per worker, at most.", kind="count", minimum=1
    )
    connect_timeout_ms: int = setting(
        2_000, doc="Longest wait for a connection, TLS included.", kind="count", minimum=1
    )
    first_byte_timeout_ms: int = setting(
        5_000,
        doc="Longest wait for an answer to begin once its request has been sent.",
        kind="count",
        minimum=1,
    )
    request_timeout_ms: int = setting(
        10_000,
        doc="Longest time without progress on a request before it is given up.",
        kind="count",
        minimum=1,
    )
    min_bytes_per_s: int = setting(
        16 * 2**10,
        doc="A body that moves more slowly than this for request_timeout_ms is given up: it hangs.",
        kind="bytes",
        minimum=1,
    )
    max_attempts: int = setting(
        3,
        doc="Tries of one fetch before it counts as failed, none of them after max_wait_ms.",
        kind="count",
        minimum=1,
    )
    hedge_percent: float = setting(
        3.0,
        doc="Of all fetches, how many may be sent a second time because their first byte is later "
        "than those of 95 % of the others. 0: none.",
        kind="number",
        minimum=0.0,
        maximum=100.0,
    )
    max_inflight_requests: int = setting(
        32,
        doc="Requests to the store at once, per worker; fewer while it throttles or is slow.",
        kind="count",
        minimum=1,
    )
    max_inflight_bytes: int = setting(
        2**30,
        doc="Bytes of objects on their way at once, per worker.",
        kind="bytes",
        minimum=2**20,
    )

    integrity: str = setting(
        "xxh3",
        doc="How objects are verified: xxh3 finds damage, blake3-keyed forgery too, none neither. "
        "Part of the namespace. See docs/objects.md.",
        kind="text",
        choices=("xxh3", "blake3-keyed", "none"),
    )
    integrity_secret_file: str | None = setting(
        None,
        doc="File with the secret of blake3-keyed, 16 bytes or more, the same on all instances. "
        f"Otherwise the environment variable {SECRET_VARIABLE}.",
        kind="text",
    )
    on_corrupt: str = setting(
        "ignore",
        doc="An object that is not what its key says is a miss. ignore: leave it in the bucket. "
        "delete: look twice, then delete it, so that the chunk can be saved anew (needs "
        "s3:DeleteObject).",
        kind="text",
        choices=("ignore", "delete"),
    )

    refresh_after_s: float = setting(
        0.0,
        doc="A hit on an object last written longer ago than this writes it anew in place, by a "
        "copy within the store that nobody waits for: then rules that delete by age delete what "
        "nobody asks for. A quarter of the bucket's expiry is about right. 0: never. Every copy is "
        "billed as a PUT and needs s3:PutObject.",
        kind="number",
        minimum=0.0,
    )

    model_id: str | None = setting(
        None,
        doc="Name of the weights, where instances load the same weights from different paths. "
        "Otherwise the model's name or path and its revision.",
        kind="text",
    )
    chunk_tokens: int = setting(
        0,
        doc="Tokens per object; a multiple of the KV block size. 0: the multiple next to 256.",
        kind="count",
        minimum=0,
    )
    host_bytes: int = setting(
        4 * 2**30, doc="Host memory for chunks, per worker.", kind="bytes", minimum=2**20
    )
    huge_pages: bool = setting(
        True,
        doc="Ask Linux for huge pages for host memory, which are allocated and copied faster. It "
        "gives them where shmem_enabled in /sys/kernel/mm/transparent_hugepage is advise; "
        "elsewhere pages are ordinary ones.",
        kind="flag",
    )
    eviction: str = setting(
        "lru",
        doc="Which chunk leaves host memory first.",
        kind="text",
        choices=("lru", "sieve", "s3fifo"),
    )

    max_wait_ms: int = setting(
        10_000,
        doc="A request never waits longer than this for the bucket.",
        kind="count",
        minimum=0,
    )
    recompute_gate: bool = setting(
        True,
        doc="Stop waiting as soon as computing the rest is expected to be faster. "
        "Off: wait up to max_wait_ms for every chunk.",
        kind="flag",
    )
    prefill_tokens_per_s: float = setting(
        8_000.0,
        doc="Prefill speed assumed until it has been measured.",
        kind="number",
        minimum=1.0,
    )
    probe_chunks: int = setting(
        64,
        doc="Chunks asked for at once when nothing is known of a prefix; doubles with each that "
        "arrives.",
        kind="count",
        minimum=1,
    )
    miss_ttl_s: float = setting(
        20.0,
        doc="For how long a chunk the bucket did not have is not asked for again.",
        kind="number",
        minimum=0.0,
    )
    max_saves_inflight: int = setting(
        256,
        doc="Chunks on their way to the bucket at once; more are dropped and counted.",
        kind="count",
        minimum=1,
    )

    encode_tokens_per_s: float = setting(
        4_000.0,
        doc="Encoder speed assumed until it has been measured, in embeddings of images, audio or "
        "video. EC connector only.",
        kind="number",
        minimum=1.0,
    )
    max_item_bytes: int = setting(
        64 * 2**20,
        doc="Largest encoder output that is saved or fetched; the same on all instances. EC "
        "connector, and tensors by content hash of the library.",
        kind="bytes",
        minimum=2**16,
        maximum=2**30,
    )
    staging_bytes: int = setting(
        256 * 2**20,
        doc="Host memory for encoder outputs on their way to the bucket, in one worker; what finds "
        "no room is not saved. EC connector only.",
        kind="bytes",
        minimum=2**20,
    )
    trust_client_uuid: bool = setting(
        False,
        doc="Cache items under the identifier a client gave them, unchecked. Off: only under what "
        "looks like vLLM's hash of the content. EC connector only.",
        kind="flag",
    )

    prices: str = setting(
        "auto",
        doc="What requests are taken to cost, for the metric cost_usd; the list is in "
        "docs/metrics.md. auto: AWS's for a bucket on AWS, nothing for one with another endpoint.",
        kind="text",
        choices=("auto", *TABLE, "none"),
    )

    on_unavailable: str = setting(
        "fail",
        doc="When the bucket cannot be used at start: fail, or serve without it and keep trying.",
        kind="text",
        choices=("fail", "serve"),
    )
    start_timeout_ms: int = setting(
        20_000, doc="Longest wait for the bucket at start.", kind="count", minimum=1
    )
    drain_timeout_s: float = setting(
        5.0,
        doc="Longest time given to unfinished uploads at shutdown. `vllm serve` kills its "
        "engine at once by default; with `--shutdown-timeout` it waits so long.",
        kind="number",
        minimum=0.0,
    )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            check(field, getattr(self, field.name))
        _check_bucket(self.bucket)
        if self.ca_bundle is not None and not Path(self.ca_bundle).is_file():
            raise ConfigError(f"ca_bundle is {self.ca_bundle!r}: there is no such file")
        url = self.endpoint_url
        if url is not None and not re.match(r"^https?://[^/\s]+", url):
            raise ConfigError(
                f"endpoint_url is {url!r}: allowed is a URL that starts with http:// or https://"
            )
        if self.prefix != self.prefix.strip("/") or not self.prefix:
            raise ConfigError(
                f"prefix is {self.prefix!r}: allowed is a non-empty key prefix without a slash at "
                "either end, such as 's3kv' or 'team-a/s3kv'"
            )

    def fetches_at_once(self, object_bytes: int) -> int:
        """How many objects of that size one worker asks for at once, at most."""
        by_bytes = self.max_inflight_bytes // object_bytes
        return max(1, min(self.max_inflight_requests, self.pool_size, by_bytes))

    def read_integrity_secret(self) -> bytes:
        """The secret of integrity "blake3-keyed", without white space at its ends.

        Raises `ConfigError`, which names where it looked and nothing it found.
        """
        path = self.integrity_secret_file
        if path is None:
            where = f"the environment variable {SECRET_VARIABLE}"
            secret = os.environ.get(SECRET_VARIABLE, "").encode()
        else:
            where = f"integrity_secret_file {path!r}"
            try:
                secret = Path(path).read_bytes()
            except OSError as error:
                raise ConfigError(f"{where} cannot be read: {error.strerror}") from error
        secret = secret.strip()
        if len(secret) < _SECRET_MIN_BYTES:
            raise ConfigError(
                f"integrity is 'blake3-keyed', and {where} holds {len(secret)} bytes: allowed are "
                f"{_SECRET_MIN_BYTES} random bytes or more, such as `openssl rand -hex 32` prints"
            )
        return secret

    @classmethod
    def parse(cls, raw: Mapping[str, Any], source: str = "kv_connector_extra_config") -> Config:
        """Settings from what vLLM calls `source`. Raises `ConfigError`.

        Byte settings take a number or a text with a unit ("4GiB", "500MB").
        """
        known = {f.name: f for f in dataclasses.fields(cls)}
        for name in raw:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.0)
                raise ConfigError(
                    f"unknown setting {name!r} in {source}; did you mean "
                    f"{near[0]!r}? Known: {', '.join(sorted(known))}"
                )
        if "bucket" not in raw:
            raise ConfigError(
                f'bucket is missing: name the bucket in {source}, as in {{"bucket": "my-bucket"}}'
            )
        return cls(**{name: convert(known[name], value) for name, value in raw.items()})


def _check_bucket(bucket: str) -> None:
    # https://docs.aws.amazon.com/AmazonS3/latest/userguide/bucketnamingrules.html; upper case and
    # underscores are let through because other servers allow them.
    if not re.match(r"^[A-Za-z0-9][A-Za-z0-9._-]{1,254}$", bucket):
        raise ConfigError(
            f"bucket is {bucket!r}: allowed is the bare name of a bucket, without s3:// and "
            "without a path (a path goes into the setting prefix)"
        )
