"""What to do about an error of the store: by its code, else by its kind. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from s3kv.errors import StoreDenied, StoreError, StoreMissing, StoreUnavailable

PERMISSION = frozenset({"", "AccessDenied"})
"""Codes of a refusal that is about the call rather than about whoever makes it. A bare 403 may be
either, and the calls that follow tell."""

_BY_CODE: Mapping[str, str] = {
    "no-credentials": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or give "
    "this machine a role",
    "bad-credentials": "look at AWS_PROFILE, and at the role or file the credentials are of",
    "InvalidAccessKeyId": "look at AWS_ACCESS_KEY_ID, or at the profile or role that is used: this "
    "store does not know its key. Is endpoint_url the store the key is for?",
    "SignatureDoesNotMatch": "look at AWS_SECRET_ACCESS_KEY: it does not belong to the access key",
    "ExpiredToken": "renew the credentials: their session has ended",
    "TokenRefreshRequired": "renew the credentials: their session has ended",
    "InvalidToken": "look at AWS_SESSION_TOKEN: set the one that came with the keys, or none",
    "RequestTimeTooSkewed": "set this machine's clock (chrony, systemd-timesyncd)",
    "AllAccessDisabled": "ask whoever owns the account: it, or the bucket, is disabled",
    "InvalidObjectState": "keep lifecycle transitions to archives off the prefix",
    "NoSuchBucket": "create the bucket, or look at bucket and endpoint_url",
    "unresolved": "look at endpoint_url and region: no such host is known here",
    "untrusted": "set ca_bundle to the authority that signed the server's certificate",
    "no-tls": "look at endpoint_url: is it http:// there, or another port?",
}
_NETWORK = (
    "look at endpoint_url and at what is between here and the store (DNS, firewall, proxy, "
    "ca_bundle), or try later"
)


def remedy_for(error: StoreError, action: str, resource: str) -> str:
    """What to do. action, resource: what a refused call needs, in the terms of an IAM policy."""
    if is_permission(error):
        return f"allow {action} on {resource} for these credentials"
    if error.code in _BY_CODE:
        return _BY_CODE[error.code]
    if error.region is not None:
        return f"set region to {error.region!r}: the bucket is there"
    if isinstance(error, StoreMissing):
        return "look at region and endpoint_url: the bucket is not there"
    if isinstance(error, StoreDenied):
        return "look at the credentials"
    if isinstance(error, StoreUnavailable):
        return _NETWORK
    return "look at endpoint_url: it should name an S3 server"


def is_permission(error: StoreError | None) -> bool:
    """Whether it is this call that is refused, rather than whoever makes it."""
    return isinstance(error, StoreDenied) and error.code in PERMISSION
