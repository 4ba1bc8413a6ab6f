"""What an S3 error answer means, in words a person can act on.

One table of codes (https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html) and one
function. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from xml.etree import ElementTree

from s3kv.errors import (
    StoreDenied,
    StoreError,
    StoreMissing,
    StoreThrottled,
    StoreUnavailable,
)
from s3kv.objects.exchange import Response
from s3kv.objects.store import ObjectInfo


@dataclass(frozen=True, slots=True)
class Call:
    """Which call was answered; for messages.

    action: the IAM action, such as "s3:GetObject". key: None for a call on the bucket itself.
    endpoint: where it was sent. region: what it was signed for.
    """

    action: str
    bucket: str
    key: str | None
    endpoint: str
    region: str

    def __str__(self) -> str:
        resource = self.bucket if self.key is None else f"{self.bucket}/{self.key}"
        return f"{self.action} on arn:aws:s3:::{resource} at {self.endpoint}"


_DENIED: Mapping[str, str] = {
    "AccessDenied": "the credentials are known but not allowed this: grant the action",
    "AllAccessDisabled": "the bucket or the account is disabled",
    "InvalidAccessKeyId": "the store does not know this access key: look at the credentials",
    "SignatureDoesNotMatch": "the secret key does not belong to the access key",
    "ExpiredToken": "the session token has expired: renew the credentials",
    "InvalidToken": "the session token is not valid: look at AWS_SESSION_TOKEN",
    "TokenRefreshRequired": "the session token must be renewed",
    "RequestTimeTooSkewed": "this machine's clock is wrong: set it",
    "InvalidObjectState": "the object has been archived: keep lifecycle transitions off the prefix",
}
_OTHER_CREDENTIALS_MAY_HELP = frozenset(
    {
        "ExpiredToken",
        "InvalidAccessKeyId",
        "InvalidToken",
        "SignatureDoesNotMatch",
        "TokenRefreshRequired",
    }
)
_ELSEWHERE = frozenset(
    {
        "PermanentRedirect",
        "TemporaryRedirect",
        "AuthorizationHeaderMalformed",
        "IllegalLocationConstraintException",
    }
)
_THROTTLED = frozenset(
    {"SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "TooManyRequests"}
)
_TRANSIENT = frozenset(
    {
        "ConditionalRequestConflict",
        "InternalError",
        "OperationAborted",
        "RequestTimeout",
        "ServiceUnavailable",
    }
)


def read_error(body: bytes) -> Mapping[str, str]:
    """The members of an S3 error document; empty when the body is none."""
    try:
        root = ElementTree.fromstring(body)
    except ElementTree.ParseError:
        return {}
    if root.tag.rpartition("}")[2] != "Error":
        return {}
    return {child.tag.rpartition("}")[2]: child.text or "" for child in root}


def info_of(key: str, nbytes: int, headers: Mapping[str, str]) -> ObjectInfo:
    """What the headers of an answer tell of an object."""
    modified_s = _seconds(headers.get("last-modified"))
    etag = headers.get("etag", "")
    if modified_s is None:
        return ObjectInfo(key, nbytes, 0.0, etag)
    now_s = _seconds(headers.get("date"))
    return ObjectInfo(key, nbytes, modified_s, etag, now_s and now_s - modified_s)


def _seconds(date: str | None) -> float | None:
    """A date of HTTP in seconds since the epoch; None for what is none."""
    try:
        return None if date is None else parsedate_to_datetime(date).timestamp()
    except ValueError:
        return None


def refuses_credentials(response: Response) -> bool:
    """Whether an answer refuses who asks, not what is asked for. It may, when it has no body."""
    if response.status not in (400, 401, 403):
        return False
    code = read_error(response.body).get("Code", "")
    return code in _OTHER_CREDENTIALS_MAY_HELP or (response.status != 400 and not code)


def error_of(response: Response, call: Call) -> StoreError:
    """The error an answer stands for, when it is not one the caller takes for a result."""
    region = response.headers.get("x-amz-bucket-region")
    return error_about(read_error(response.body), response.status, call, region)


def error_about(
    said: Mapping[str, str], status: int, call: Call, bucket_region: str | None = None
) -> StoreError:
    """The error with these members, which came with `status`.

    bucket_region: where the bucket is, if a header told.
    """
    code = said.get("Code", "")
    what = f"{call}: {status} {code or '(no code)'}"
    if detail := said.get("Message"):
        what = f"{what}, {detail!r}"
    if code in _ELSEWHERE or status in (301, 302, 307, 308):
        there = said.get("Region") or bucket_region
        where = f"set region to {there!r}" if there else "look at region and endpoint_url"
        said_where = f"not reachable with region {call.region!r}, {where}"
        return StoreMissing(f"{what}: {said_where}", code=code, region=there)
    if code == "NoSuchBucket":
        todo = "create the bucket, or look at bucket and endpoint_url"
        return StoreMissing(f"{what}: {todo}", code=code)
    if code in _DENIED or status in (401, 403):
        why = _DENIED.get(code, _DENIED["AccessDenied"])
        return StoreDenied(f"{what}: {why}{_hint(call)}", code=code)
    if code in _THROTTLED or status == 429:
        return StoreThrottled(f"{what}: the store asks for fewer requests", code=code)
    if status >= 500 and status != 501:
        return StoreUnavailable(f"{what}: the server failed", code=code)
    if code in _TRANSIENT:
        return StoreUnavailable(f"{what}: may work when sent again", code=code)
    unknown = "not an answer s3kv knows; does endpoint_url name an S3 server?"
    return StoreError(f"{what}: {unknown}", code=code)


def _hint(call: Call) -> str:
    if call.action != "s3:GetObject":
        return ""
    # https://docs.aws.amazon.com/AmazonS3/latest/API/API_GetObject.html, "Permissions"
    return (
        f"; without s3:ListBucket on arn:aws:s3:::{call.bucket}, S3 answers so for missing objects "
        "too"
    )
