"""Settings of s3kv, parsed once and then frozen.

The keys are those of `kv_connector_extra_config` and `ec_connector_extra_config`: one class serves
both connectors. A setting's annotation says what is allowed, and msgspec holds each value to it.
The package takes its settings from here alone (botocore reads its own environment variables for
credentials and region). Secrets, those of `integrity` and `encryption`, are never fields:
`s3kv.secrets` reads them when they are needed.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from s3kv.errors import ConfigError

SECRET_VARIABLE = "S3KV_INTEGRITY_SECRET"
"""The environment variable that holds the secret of `integrity` if no file does."""
KEYS_VARIABLE = "S3KV_ENCRYPTION_KEYS"
"""The environment variable that holds the master keys of `encryption` if no file does."""
_STAGING_BYTES = 64 * 2**20
MAX_INFLIGHT_BYTES = 2**30
"""Most bytes of objects that one worker fetches or uploads at once."""
_TIMEOUT = "it follows from request_timeout_ms"
_FIXED = "its value is fixed: no store and no measurement needed another"
REMOVED = {
    "bucket_min_age_s": "nothing younger than a minute is deleted",
    "checksum": "uploads carry no checksum for the server, because many servers refuse it: TLS "
    "protects the transfer, and s3kv verifies every object that it reads",
    "connect_timeout_ms": f"{_TIMEOUT} (a fifth)",
    "encode_tokens_per_s": "the speed of the encoder is measured",
    "eviction": "host memory is evicted by LRU (docs/decisions/0003-default-eviction-policy.md)",
    "first_byte_timeout_ms": f"{_TIMEOUT} (half)",
    "hedge_percent": "at most a tenth of the fetches are sent twice (docs/operating.md)",
    "huge_pages": "s3kv always requests huge pages, and uses ordinary ones otherwise",
    "max_attempts": f"{_FIXED} (3)",
    "max_inflight_bytes": "set max_inflight_requests to have fewer objects in flight",
    "max_item_bytes": f"{_FIXED} (64 MiB)",
    "max_saves_inflight": f"{_FIXED} (256)",
    "min_bytes_per_s": f"{_FIXED} (16 KiB)",
    "miss_ttl_s": f"{_FIXED} (20 s)",
    "on_corrupt": "the next upload of a chunk replaces an object that failed verification",
    "pool_size": "a worker has two connections for each of max_inflight_requests",
    "prefill_tokens_per_s": "the speed of prefill is measured (docs/operating.md)",
    "prices": "the prices are AWS's for the bucket's region; for others see `s3kv cost`",
    "probe_chunks": f"{_FIXED} (64; docs/decisions/0008-the-first-window.md)",
    "range_bytes": f"{_FIXED} (4 MiB; docs/decisions/0017-ranged-reads.md)",
    "recompute_gate": "a request always stops waiting once computing is expected to be faster; "
    "max_wait_ms bounds its wait",
    "staging_bytes": "it follows from host_bytes (a sixteenth)",
    "start_timeout_ms": f"{_FIXED} (20 s); set on_unavailable to serve without the bucket",
    "trust_client_uuid": "it is called 'trust_media_names' now, and both connectors have it",
}
"""Settings of earlier versions, and what holds instead."""

_BYTES = {"allowed": "a number of bytes, or text with a unit such as '4GiB'"}
_UNIT_BYTES = {
    **{"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12},
    **{"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40},
}

Positive = Annotated[int, Meta(ge=1, le=1_000_000_000)]
NotNegative = Annotated[int, Meta(ge=0, le=1_000_000_000)]
Seconds = Annotated[float, Meta(ge=0.0, le=1_000_000_000)]
Bytes = Annotated[int, Meta(le=10**18, extra=_BYTES)]
Mebibytes = Annotated[Bytes, Meta(ge=2**20)]
Bucket = Annotated[
    str,
    # https://docs.aws.amazon.com/AmazonS3/latest/userguide/bucketnamingrules.html; other servers
    # allow upper case and underscores. Access points may be multi-region ones or on Outposts.
    Meta(
        pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]{1,254}|arn:aws[a-z-]*:s3(-outposts)?:[a-z0-9-]*:"
        r"[0-9]{12}:(accesspoint|outpost)[/:]\S+)\Z",
        extra={
            "allowed": "the bare name of a bucket, without s3:// and without a path (a path goes "
            "into the setting prefix), or the ARN of an access point, such as "
            "'arn:aws:s3:eu-west-1:123456789012:accesspoint/my-access-point'"
        },
    ),
]
Prefix = Annotated[
    str,
    Meta(
        # XML carries neither control characters nor half a surrogate pair.
        pattern=r"^(?!/)[^\x00-\x1f\x7f\ud800-\udfff]+(?<!/)\Z",
        extra={
            "allowed": "a non-empty key prefix without control characters and without a slash at "
            "either end, such as 's3kv' or 'team-a/s3kv'"
        },
    ),
]
Region = Annotated[
    str, Meta(pattern=r"^\S+\Z", extra={"allowed": "the name of a region, such as 'eu-west-1'"})
]
Url = Annotated[
    str,
    Meta(
        pattern=r"^https?://([A-Za-z0-9._-]+|\[[^]/?#@\s]+\])(:[1-9][0-9]{0,4})?(/[^?#@\s]*)?\Z",
        extra={
            "allowed": "a URL such as 'https://store.example:9000', if needed with a path, without "
            "user, password, query and fragment (credentials are found as by every AWS tool)"
        },
    ),
]
DiskPath = Annotated[
    str,
    Meta(
        pattern=r"^/[^\x00\ud800-\udfff]*(?<!/)\Z",
        extra={"allowed": "an absolute path, such as '/mnt/nvme/s3kv'"},
    ),
]
_SSE = "server-side-encryption(-aws-kms-key-id|-bucket-key-enabled)?"
PutHeaders = Annotated[
    dict[
        Annotated[str, Meta(pattern=rf"^x-amz-(acl|storage-class|{_SSE})\Z")],
        # Nothing that leaves objects unreadable (archives), or lets everybody read them.
        Annotated[str, Meta(pattern=r"^(?!GLACIER\Z|DEEP_|public-|authenticated-)[!-~]+\Z")],
    ],
    Meta(
        extra={
            "allowed": "an object of headers and their values: x-amz-server-side-encryption, the "
            "same with -aws-kms-key-id or -bucket-key-enabled, x-amz-acl (nothing public), "
            "x-amz-storage-class (no archive)"
        }
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The settings of one engine. Immutable; safe to pickle and to send to other processes.

    Byte settings take a number or a text with a unit ("4GiB", "500MB"). Raises `ConfigError`, which
    names the setting, its value and the allowed values.
    """

    bucket: Bucket
    """Name of the bucket, or ARN of an access point. It must exist."""
    prefix: Prefix = "s3kv"
    """Prefix of all keys, so that one bucket can hold more."""
    region: Region | None = None
    """AWS region; otherwise the one botocore's own chain finds."""
    endpoint_url: Url | None = None
    """URL of an S3-compatible server; otherwise AWS_ENDPOINT_URL or AWS itself."""
    addressing_style: Literal["auto", "path", "virtual"] = "auto"
    """Bucket in the path or in the host name. auto: path when an endpoint is given."""
    client: Literal["auto", "fast", "aiobotocore"] = "auto"
    """S3 client: s3kv's own (fast), or AWS's SDK (aiobotocore), which takes two to three times the
    processor time. auto: fast, unless a proxy or an ARN needs the other."""
    ca_bundle: str | None = None
    """File of certificate authorities to trust instead of the system's."""
    verify_tls: bool = True
    """Verify the server's certificate. Turn off only in a laboratory."""
    put_headers: PutHeaders | None = None
    """Headers of every write, for buckets whose policy demands them, such as
    {"x-amz-server-side-encryption": "aws:kms"}. Without it the bucket's own encryption applies."""
    request_timeout_ms: Positive = 10_000
    """Time after which a request that is slower than 16 KiB per second is given up. A connection
    gets a fifth of it, and the first byte of an answer half."""
    max_inflight_requests: Positive = 32
    """Most requests to the store at once, per worker; fewer while it throttles."""

    integrity: Literal["xxh3", "blake3-keyed", "none"] = "xxh3"
    """Verification of objects: xxh3 finds damage, blake3-keyed also finds forgery, none finds
    neither. Part of the namespace. See docs/objects.md."""
    integrity_secret_file: str | None = None
    """File with the secret of blake3-keyed, 16 bytes or more, the same on all instances. Without it
    the secret is in the environment variable S3KV_INTEGRITY_SECRET."""

    encryption: Literal["off", "aes-gcm"] = "off"
    """Encrypt objects and their names, in the bucket and on the disk (AES-256-GCM); needs the extra
    encryption (cryptography). Give all instances the same keys. See docs/encryption.md."""
    encryption_keys_file: str | None = None
    """File with the master keys of aes-gcm, one per line: 64 hex digits, or kms: and a data key
    that AWS KMS decrypts. The first key encrypts, all decrypt. Without it the keys are in the
    environment variable S3KV_ENCRYPTION_KEYS."""

    refresh_after_s: Seconds = 0.0
    """Age after which uses begin to renew an object (every use does from 1.25 times that age on),
    by a copy onto itself within the store that no request waits for. Uses in host memory and on the
    device count, too. Lifecycle rules that delete by age then delete only unused objects. A quarter
    of the bucket's expiry is about right. 0: never. Every copy is billed as a PUT and needs
    s3:PutObject."""

    bucket_bytes: Annotated[Bytes, Meta(ge=0)] = 0
    """Budget of s3kv's objects under the prefix. Beyond it those used longest ago are deleted, by
    one engine of all that have the setting, which refreshes objects in use, too, as for
    refresh_after_s. Give all engines the same value. 0: no budget. Needs s3:DeleteObject."""
    bucket_idle_s: Seconds = 0.0
    """Time after which an object that is not used is deleted, in the same way. 0: never."""

    model_id: str | None = None
    """Name of the weights, for instances that load the same weights from different paths. Without
    it: the model's name or path, and its revision."""
    weights_digest: Literal["sampled", "full"] = "sampled"
    """Digest that distinguishes weights and adapters of the same name. sampled: of parts of
    every tensor, which misses a change of a small part of a large one (docs/security.md). full: of
    every byte, which takes as long as reading all files. Part of the namespace: give it the same
    value on all instances."""
    chunk_tokens: NotNegative = 0
    """Tokens per object; a multiple of the KV block size. 0: the multiple closest to 256."""
    share_ranks: bool = False
    """Share chunks with engines of other tensor- and pipeline-parallel sizes: a chunk that the
    bucket does not have for this rank is put together from their chunks. Part of the
    namespace: give all instances the same value. Models whose KV cannot be divided by heads share
    with their own size alone, and the log reports it. See docs/objects.md."""
    host_bytes: Mebibytes = 4 * 2**30
    """Host memory for chunks, per worker. EC connector: for encoder outputs, per engine, and a
    sixteenth more (64 MiB or more) for uploads."""
    disk_path: DiskPath | None = None
    """Directory on a local disk for objects, which is asked before the bucket; made if it is
    missing. All workers and engines of a host share it, and those that come after them. See
    docs/disk.md."""
    disk_bytes: Annotated[Bytes, Meta(ge=0)] = 0
    """Budget of all files in disk_path. Beyond 95 % of it the files used longest ago are deleted.
    Give all engines the same value."""
    disk_writes: Literal["fetched", "all"] = "fetched"
    """Objects that are written to the disk. fetched: those that come from the bucket, because they
    are in use again. all: uploads, too, which wears the disk six times as fast."""

    compress: Literal["auto", "on", "off"] = "auto"
    """Compress chunks for the bucket, without loss; needs the extra compression (blosc2). auto:
    where it is installed, and the bucket is not nearly as fast as this host decodes. Where it is
    installed, chunks of either form are read with every setting. See docs/compression.md."""

    max_wait_ms: NotNegative = 10_000
    """Longest wait of a request for the bucket. It ends earlier if computing the rest is expected
    to be faster."""
    trust_media_names: bool = False
    """Identify images, audio and video by their names, including names that clients give. Off:
    identify them by a digest of the encoder's input."""

    on_unavailable: Literal["fail", "serve"] = "fail"
    """Action if the bucket or disk_path cannot be used at start: fail, or serve without it. The
    bucket is tried again."""
    drain_timeout_s: Seconds = 4.0
    """Longest time given to unfinished uploads at shutdown. `vllm serve` kills its engine at once
    by default; give it a `--shutdown-timeout` to make it wait."""

    def __post_init__(self) -> None:
        for name, annotation in _ANNOTATIONS.items():
            given = getattr(self, name)
            value = parse_bytes(given) if is_bytes(name) and isinstance(given, str) else given
            try:
                value = msgspec.convert(value, annotation)
            except msgspec.ValidationError:
                told = f"{name} is {masked(repr(given))}: allowed is {allowed(name)}"
                raise ConfigError(told) from None
            object.__setattr__(self, name, value)
        if self.ca_bundle is not None and not Path(self.ca_bundle).is_file():
            raise ConfigError(f"ca_bundle is {self.ca_bundle!r}: there is no such file")
        if (self.disk_path is None) != (self.disk_bytes == 0):
            given = f"disk_path is {self.disk_path!r}, and disk_bytes is {self.disk_bytes}"
            raise ConfigError(f"{given}: give both, such as '/mnt/nvme/s3kv' and '500GB', or none")
        if self.compress == "on" and self.integrity == "none":
            raise ConfigError(
                "compress is 'on', and integrity is 'none': allowed then is 'auto' or 'off', "
                "because only verified bytes are decoded"
            )
        if self.disk_path is not None and self.integrity == "none":
            raise ConfigError(
                "disk_path needs objects that can be verified: a file may be damaged when the "
                "machine loses power. Leave out integrity, which is 'none', or disk_path"
            )

    @property
    def pool_size(self) -> int:
        """Most connections to the store per worker. Each request may be sent a second time."""
        return 2 * self.max_inflight_requests

    @property
    def staging_bytes(self) -> int:
        """Host memory for encoder outputs that are being uploaded, in one worker."""
        return max(self.host_bytes // 16, min(self.host_bytes, _STAGING_BYTES))

    def fetches_at_once(self, object_bytes: int) -> int:
        """Most objects of `object_bytes` that one worker fetches at once."""
        return max(1, min(self.max_inflight_requests, MAX_INFLIGHT_BYTES // object_bytes))

    @classmethod
    def parse(cls, raw: Mapping[str, Any], source: str = "the settings") -> Config:
        """The settings in `raw`. Raises `ConfigError`, for a setting that does not exist as well.

        source: their name in messages.
        """
        for name in raw:
            if name in REMOVED:
                raise ConfigError(f"{name} in {source} was removed: {REMOVED[name]}")
            if name not in _ANNOTATIONS:
                near = difflib.get_close_matches(str(name), _ANNOTATIONS, n=1)
                advice = (
                    f"; did you mean {near[0]!r}?"
                    if near
                    else f". Known: {', '.join(sorted(_ANNOTATIONS))}"
                )
                raise ConfigError(f"unknown setting {name!r} in {source}{advice}")
        if "bucket" not in raw:
            raise ConfigError(
                f'bucket is missing: name the bucket in {source}, as in {{"bucket": "my-bucket"}}'
            )
        return cls(**raw)


_ANNOTATIONS: dict[str, Any] = get_type_hints(Config, include_extras=True)


def masked(text: str) -> str:
    """The text without what a URL in it has before its host: a user, and perhaps a password."""
    return re.sub(r"(//|^(?=[^@]*:)(?!.*//)).*@", r"\1***@", text, flags=re.DOTALL)


def parse_bytes(text: str) -> int | None:
    """A number of bytes with or without a unit ("4GiB", "500MB", "4096"); None for other text."""
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d+)?)\s*([kmgt]?b|[kmgt]ib)?\s*", text, re.IGNORECASE)
    return match and math.ceil(float(match[1]) * _UNIT_BYTES[(match[2] or "b").lower()])


def size(nbytes: int) -> str:
    """Bytes for people: in the largest binary unit that they fill at least once, up to TiB."""
    amount = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def count(number: int, noun: str) -> str:
    """Number and noun for people: "1 file", "2,000 files"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def is_bytes(setting: str) -> bool:
    """Whether the setting is a number of bytes."""
    limits = getattr(_ANNOTATIONS[setting], "__metadata__", ())
    return any(meta.extra is _BYTES for meta in limits)


def allowed(setting: str) -> str:
    """The allowed values of a setting, in words; for error messages and the documentation."""
    annotation = _ANNOTATIONS[setting]
    if type(None) in get_args(annotation):
        annotation = get_args(annotation)[0]
    if get_origin(annotation) is Literal:
        return " or ".join(map(repr, get_args(annotation)))
    base, *limits = get_args(annotation) or (annotation,)
    kinds = {str: "text", bool: "true or false", int: "a whole number", float: "a number"}
    words: str = next((meta.extra["allowed"] for meta in limits if meta.extra), "") or kinds[base]
    for meta in limits:
        words += "" if meta.ge is None else f", {meta.ge:,} or more"
        words += "" if meta.le is None else f", at most {meta.le:,}"
    return words
