"""Every fault of the suite: what it does, and which counter tells of it.

One row of the failure table in docs/operating.md per case; a test compares.
"""

from __future__ import annotations

from dataclasses import dataclass

from lab.faults import Fault, s3_error


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """fault: what the proxy does, for the verbs of each phase; None: the case is made otherwise.

    lookup, fetch, upload: the end that chunks have in that phase: one nobody has, one the bucket
    has, one that is saved ("": any; an answer without a body is whole with its head).
    start: the trouble that is told, "" for any.
    """

    fault: Fault | None
    lookup: str = "fetch_failed"
    fetch: str = "fetch_failed"
    upload: str = "upload_failed"
    retried: str | None = None
    """How an upload under the fault ends when it is tried again after it."""
    start: str | None = "unavailable"
    scheme: str = "http"
    planted: bool = False
    """Another chunk's object lies under the right key."""
    nameless: bool = False
    """The server's name cannot be resolved."""
    in_time: bool = False
    """Time alone tells of the fault."""


_ERROR_BODY = "<Error><Code>InternalError</Code><Message>on command</Message></Error>"
_ABSENT = "fetch_missing"
_DENIED = {"lookup": "fetch_denied", "fetch": "fetch_denied", "upload": "upload_denied"}
_DAMAGED = {"lookup": _ABSENT, "fetch": "fetch_corrupt"}
_HARMLESS = {"lookup": _ABSENT, "fetch": "fetch_ok", "upload": "upload_ok", "start": None}

CASES: dict[str, Case] = {
    "refuse": Case(fault=Fault(kind="refuse")),
    "dns": Case(fault=None, nameless=True),
    "tls-certificate": Case(fault=Fault(kind="certificate"), scheme="https"),
    "reset-before-headers": Case(fault=Fault(kind="reset_before_head")),
    "reset-inside-headers": Case(fault=Fault(kind="reset_inside_head"), retried="upload_exists"),
    "reset-after-headers": Case(fault=Fault(kind="reset_after_head"), upload=""),
    "reset-mid-body": Case(fault=Fault(kind="reset_mid_body")),
    "lost-answer": Case(fault=Fault(kind="lose_answer"), retried="upload_exists"),
    "truncated": Case(fault=Fault(kind="truncate")),
    "truncated-and-relabelled": Case(fault=Fault(kind="shorten"), **_DAMAGED),
    "flipped-http-header": Case(fault=Fault(kind="flip_head"), retried="upload_exists"),
    "flipped-object-header": Case(
        fault=Fault(kind="flip_body", at=20), **_DAMAGED, upload="upload_ok", start=""
    ),
    "flipped-payload": Case(
        fault=Fault(kind="flip_body", at=-5), **_DAMAGED, upload="upload_ok", start=""
    ),
    "wrong-object": Case(
        fault=None,
        planted=True,
        lookup="fetch_corrupt",
        fetch="fetch_corrupt",
        upload="upload_exists",
        start=None,
    ),
    "delay": Case(fault=Fault(kind="delay", seconds=0.05), **_HARMLESS),
    "trickle": Case(
        fault=Fault(kind="trickle", nbytes=1000, seconds=0.1),
        lookup=_ABSENT,
        start=None,
        in_time=True,
    ),
    "black-hole": Case(fault=Fault(kind="black_hole"), in_time=True),
    "internal-error": Case(fault=s3_error(500, "InternalError")),
    "unavailable": Case(fault=s3_error(503, "ServiceUnavailable")),
    "slow-down": Case(fault=s3_error(503, "SlowDown")),
    "slow-down-once": Case(
        fault=s3_error(503, "SlowDown", times=1), lookup=_ABSENT, fetch="fetch_ok", start=None
    ),
    "error-body-with-200": Case(
        fault=Fault(kind="answer", body=_ERROR_BODY), lookup="fetch_corrupt", fetch="fetch_corrupt"
    ),
    "redirect": Case(
        fault=s3_error(301, "PermanentRedirect", headers={"x-amz-bucket-region": "eu-west-1"}),
        start="missing",
    ),
    "access-denied": Case(fault=s3_error(403, "AccessDenied"), **_DENIED, start="denied"),
    "expired-token": Case(fault=s3_error(400, "ExpiredToken"), **_DENIED, start="denied"),
    "clock-skew": Case(fault=s3_error(403, "RequestTimeTooSkewed"), **_DENIED, start="denied"),
}
