"""Findings, the results of the checks, and remedies for errors of the store. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from s3kv.errors import StoreDenied, StoreError, StoreMissing, StoreUnavailable
from s3kv.stores.s3.answers import DENIED

Status = Literal["ok", "warning", "fault", "skipped"]
"""warning: the cache works, but less well. fault: it does not work. skipped: not checked, because
of another finding or by choice."""

_BY_CODE: Mapping[str, str] = {
    **DENIED,
    "no-credentials": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or give "
    "this machine a role",
    "bad-credentials": "check AWS_PROFILE, and the role or file of the credentials",
    "NoSuchBucket": "create the bucket, or check bucket and endpoint_url",
    "unresolved": "check endpoint_url and region: no such host is known here. If it is known "
    "without the bucket's name in front of it, set addressing_style to 'path'",
    "untrusted": "set ca_bundle to the authority that signed the server's certificate",
    "proxy": "check HTTPS_PROXY and HTTP_PROXY: is the proxy there, and does it let this host "
    "use it? If the bucket can be reached without it, list its host in NO_PROXY",
    "no-tls": "check endpoint_url: does the server speak http://, or use another port?",
    "botocore": "check AWS_PROFILE, the files and variables of AWS's tools, and endpoint_url",
}
_BY_KIND: Mapping[type[StoreError], str] = {
    StoreMissing: "check region and endpoint_url: the bucket is not there",
    StoreDenied: "check the credentials",
    StoreUnavailable: "check endpoint_url and the path to the store (DNS, "
    "firewall, proxy, ca_bundle), or try later",
    StoreError: "check endpoint_url: it should name an S3 server",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. remedy: empty if there is nothing to do."""

    check: str
    status: Status
    detail: str
    remedy: str = ""


def is_healthy(findings: Iterable[Finding]) -> bool:
    """Whether there is no fault; warnings do not count."""
    return all(finding.status != "fault" for finding in findings)


def remedy_for(error: StoreError, action: str, resource: str) -> str:
    """The remedy for an error. action, resource: IAM's names of what the refused call needs."""
    if is_permission(error):
        return f"allow {action} on {resource} for these credentials"
    if error.code in _BY_CODE:
        return _BY_CODE[error.code]
    if error.region is not None:
        return f"set region to {error.region!r}: the bucket is there"
    return next(remedy for kind, remedy in _BY_KIND.items() if isinstance(error, kind))


def is_permission(error: StoreError | None) -> bool:
    """Whether the store refused this call rather than the caller."""
    # A bare 403, without a code, may be either; the calls that follow show which.
    return isinstance(error, StoreDenied) and error.code in ("", "AccessDenied")
