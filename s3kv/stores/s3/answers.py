"""S3's answers: headers, XML documents, and errors in words a person can act on. Pure.

The errors are one table of codes
(https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html) and one function.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import NamedTuple
from urllib.parse import unquote_plus
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from s3kv.errors import (
    StoreDenied,
    StoreError,
    StoreMissing,
    StoreRefused,
    StoreThrottled,
    StoreUnavailable,
    StoreUnranged,
)
from s3kv.stores.http.exchange import whole_of
from s3kv.stores.store import ObjectInfo

VERBS = {
    "s3:GetObject": "GET",
    "s3:PutObject": "PUT",
    "s3:DeleteObject": "DELETE",
    "s3:ListBucket": "LIST",
}
"""The verb that a request is counted under, by its IAM action; a HEAD is counted as "HEAD"."""
_XML_NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"
_PARTITIONS = {
    **{"cn": "aws-cn", "us-gov": "aws-us-gov", "eusc-de": "aws-eusc", "us-iso": "aws-iso"},
    **{"us-isob": "aws-iso-b", "eu-isoe": "aws-iso-e", "us-isof": "aws-iso-f"},
}
"""AWS's partitions other than "aws", by the first words of their regions' names."""
_Members = Mapping[str, str]
_HAD_CHANGED = ("PreconditionFailed", "ConditionalRequestConflict")
_UNREADABLE = (ElementTree.ParseError, LookupError, ValueError)
"""Raised for a document that is not XML, has an unknown encoding, or lacks an element."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call to the store; for messages.

    action: the IAM action, such as "s3:GetObject". key: None for a call on the bucket itself.
    endpoint: URL it was sent to. region: region it was signed for.
    """

    action: str
    bucket: str
    key: str | None
    endpoint: str
    region: str

    def __str__(self) -> str:
        return f"{self.action} on {arn_of(self.region, self.bucket, self.key)} at {self.endpoint}"


def partition_of(region: str) -> str:
    """AWS's partition of a region, such as "aws-cn"; "aws" for the region of another store."""
    return _PARTITIONS.get(region.rsplit("-", 2)[0], "aws")


def arn_of(region: str, bucket: str, key: str | None = None) -> str:
    """ARN of a bucket or an object for a policy. bucket: a name, or an access point's ARN."""
    is_arn = bucket.startswith("arn:")
    arn = bucket if is_arn else f"arn:{partition_of(region)}:s3:::{bucket}"
    return arn if key is None else f"{arn}{'/object/' if is_arn else '/'}{key}"


_RENEW = "renew the credentials: their session has ended"
DENIED: Mapping[str, str] = {
    "AccessDenied": "the credentials are known but not allowed this: grant the action",
    "AllAccessDisabled": "contact the owner of the account: it, or the bucket, is disabled",
    "InvalidAccessKeyId": "check AWS_ACCESS_KEY_ID, or the profile or role in use: this "
    "store does not know its key. Is endpoint_url the store the key is for?",
    "SignatureDoesNotMatch": "check AWS_SECRET_ACCESS_KEY: it does not belong to the access key",
    "ExpiredToken": _RENEW,
    "InvalidToken": "check AWS_SESSION_TOKEN: set the one that came with the keys, or none",
    "TokenRefreshRequired": _RENEW,
    "RequestTimeTooSkewed": "set this machine's clock (chrony, systemd-timesyncd)",
    "InvalidObjectState": "keep lifecycle transitions off the prefix: the object is archived",
}
"""What to do, by the code of a refusal."""
_OTHER_CREDENTIALS_MAY_HELP = (
    *("ExpiredToken", "InvalidAccessKeyId", "InvalidToken"),
    *("SignatureDoesNotMatch", "TokenRefreshRequired"),
)
_ELSEWHERE = (
    *("PermanentRedirect", "TemporaryRedirect"),
    *("AuthorizationHeaderMalformed", "IllegalLocationConstraintException"),
)
THROTTLED = (
    *("SlowDown", "Throttling", "ThrottlingException"),
    *("RequestLimitExceeded", "TooManyRequests"),
)
_TRANSIENT = (
    *("ConditionalRequestConflict", "InternalError", "OperationAborted"),
    *("RequestTimeout", "ServiceUnavailable"),
)
_REFUSED = ("EntityTooLarge", "InvalidURI", "KeyTooLongError")
_ERRORS: Sequence[tuple[Container[str], Container[int], type[StoreError], str]] = (
    (THROTTLED, (429,), StoreThrottled, "the store throttles requests (SlowDown)"),
    ((), (500, *range(502, 600)), StoreUnavailable, "the server failed"),
    (_TRANSIENT, (408,), StoreUnavailable, "may work when sent again"),
    (_REFUSED, (413, 414), StoreRefused, "the store takes no such object or key"),
)
"""Errors by code and by status: their kind and their text. The first match counts."""


def info_of(key: str, nbytes: int, headers: Mapping[str, str]) -> ObjectInfo:
    """Metadata of an object from the headers of an answer."""
    modified_s = _seconds(headers.get("last-modified"))
    etag, version = headers.get("etag", ""), headers.get("x-amz-version-id", "")
    now_s = None if modified_s is None else _seconds(headers.get("date"))
    age_s = now_s and now_s - (modified_s or 0.0)
    return ObjectInfo(key, nbytes, modified_s or 0.0, etag, age_s, version)


def range_of(first: int, nbytes: int) -> str:
    """The header `Range` of a request for `nbytes` from offset `first` on."""
    return f"bytes={first}-{first + nbytes - 1}"


def length_of(call: Call, bounds: str | None, received: int, headers: Mapping[str, str]) -> int:
    """Length of the whole object. bounds: the header `Range` of the request, if it has one.
    received: length of the answer's body. Raises `StoreUnranged` if the answer is not that range,
    cut at the object's end."""
    whole = whole_of(bounds, headers, received)
    if whole is None:
        told = headers.get("content-range", "")
        raise StoreUnranged(f"{call}: {received} bytes with Content-Range {told!r} for {bounds}")
    return whole


def _seconds(date: str | None) -> float | None:
    """An HTTP date in seconds since the epoch; None if it is not one."""
    try:
        return None if date is None else parsedate_to_datetime(date).timestamp()
    except (ValueError, OverflowError):
        return None


class ListingPage(NamedTuple):
    """One page of a listing. folders: common prefixes. token: of the next page; empty on the last;
    None: more pages but no token, as from a server that supports only the first ListObjects."""

    objects: Sequence[ObjectInfo]
    folders: Sequence[str]
    token: str | None


def read_page(body: bytes, call: Call) -> ListingPage:
    """One page of ListObjectsV2. Raises `StoreUnavailable` if the document cannot be read."""
    try:
        root = _root(body, "ListBucketResult")
        # AWS and MinIO encode a space as "+". Some servers ignore the requested encoding.
        name = unquote_plus if root.findtext("{*}EncodingType") == "url" else str
        return ListingPage(
            [_listed(item, name) for item in root.iterfind("{*}Contents")],
            [name(_text(item, "Prefix")) for item in root.iterfind("{*}CommonPrefixes")],
            root.findtext("{*}NextContinuationToken")
            or (None if root.findtext("{*}IsTruncated") == "true" else ""),
        )
    except _UNREADABLE as error:
        raise StoreUnavailable(f"{call}: the listing cannot be read: {error}") from error


def _listed(item: ElementTree.Element, name: Callable[[str], str]) -> ObjectInfo:
    modified = datetime.fromisoformat(_text(item, "LastModified").replace("Z", "+00:00"))
    key, nbytes = name(_text(item, "Key")), int(_text(item, "Size"))
    return ObjectInfo(key, nbytes, modified.timestamp(), item.findtext("{*}ETag") or "")


def deletion(objects: Sequence[ObjectInfo]) -> bytes:
    """The body of a DeleteObjects request. It deletes an object only if its ETag is unchanged (if
    `ObjectInfo` has one), and requests an answer that lists errors only."""
    items = ""
    for info in objects:
        etag = f"<ETag>{escape(info.etag)}</ETag>" if info.etag else ""
        items += f"<Object><Key>{escape(info.key)}</Key>{etag}</Object>"
    return f'<Delete xmlns="{_XML_NAMESPACE}"><Quiet>true</Quiet>{items}</Delete>'.encode()


def read_deletion(body: bytes, asked: int, call: Call) -> Sequence[str]:
    """The keys that DeleteObjects left; see `left_by_deletion`. Raises `StoreUnavailable` if the
    answer cannot be read; any of the objects may have been deleted then."""
    try:
        root = _root(body, "DeleteResult")
        errors = {_text(item, "Key"): _members(item) for item in root.iterfind("{*}Error")}
    except _UNREADABLE as error:
        raise StoreUnavailable(f"{call}: the answer cannot be read: {error}") from error
    return left_by_deletion(errors, asked, call)


def left_by_deletion(errors: Mapping[str, _Members], asked: int, call: Call) -> Sequence[str]:
    """The keys that a deletion left. errors: the members of its error, by key of each object not
    deleted. asked: number of objects to delete. If all are left, and not only because they had
    changed, raises the first refusal; otherwise one refused object does not stop the others."""
    left = {key: said for key, said in errors.items() if said.get("Code") != "NoSuchKey"}
    failed = [key for key, said in left.items() if said.get("Code") not in _HAD_CHANGED]
    if failed and len(left) == asked:
        raise error_about(left[failed[0]], 200, dataclasses.replace(call, key=failed[0]))
    return [*left]


def _root(body: bytes, tag: str) -> ElementTree.Element:
    root = ElementTree.fromstring(body)
    if not root.tag.endswith(tag):
        raise ValueError(f"it is a {root.tag}")
    return root


def _members(item: ElementTree.Element) -> dict[str, str]:
    return {child.tag.rpartition("}")[2]: child.text or "" for child in item}


def _text(item: ElementTree.Element, name: str) -> str:
    text = item.findtext(f"{{*}}{name}")
    if text is None:
        raise ValueError(f"{name} is missing")
    return text


def read_error(body: bytes) -> Mapping[str, str]:
    """The members of an S3 error document; empty if the body is not one."""
    try:
        root = ElementTree.fromstring(body)
    except _UNREADABLE:
        return {}
    return _members(root) if root.tag.rpartition("}")[2] == "Error" else {}


class Refusal(Exception):
    """Error answer of the store. error: to be raised unless the caller expects this answer.
    of_credentials: whether the store refuses the caller rather than the call, which includes a 401
    or 403 without a code. Parameters as for `error_about`."""

    def __init__(
        self, said: Mapping[str, str], status: int, call: Call, bucket_region: str | None = None
    ) -> None:
        code = said.get("Code", "")
        self.status = status
        self.error = error_about(said, status, call, bucket_region)
        self.no_such_key = status == 404 and code != "NoSuchBucket"
        with_code = status in (400, 401, 403) and code in _OTHER_CREDENTIALS_MAY_HELP
        self.of_credentials = with_code or (status in (401, 403) and not code)
        super().__init__(str(self.error))


def error_about(
    said: Mapping[str, str], status: int, call: Call, bucket_region: str | None = None
) -> StoreError:
    """The error for an error document with these members and this status. bucket_region: region of
    the bucket, from a header."""
    code = said.get("Code", "")
    what = f"{call}: {status} {code or '(no code)'}"
    if detail := said.get("Message"):
        what = f"{what}, {detail!r}"
    if code in _ELSEWHERE or status in (301, 302, 307, 308):
        there = said.get("Region") or bucket_region
        where = f"set region to {there!r}" if there else "check region and endpoint_url"
        said_where = f"not reachable with region {call.region!r}, {where}"
        return StoreMissing(f"{what}: {said_where}", code=code, region=there)
    if code == "NoSuchBucket":
        todo = "create the bucket, or check bucket and endpoint_url"
        return StoreMissing(f"{what}: {todo}", code=code)
    if code in DENIED or status in (401, 403):
        hint = ""
        if call.action == "s3:GetObject":
            # https://docs.aws.amazon.com/AmazonS3/latest/API/API_GetObject.html, "Permissions"
            bucket = arn_of(call.region, call.bucket)
            hint = f"; without s3:ListBucket on {bucket}, S3 answers so for missing objects too"
        return StoreDenied(f"{what}: {DENIED.get(code, DENIED['AccessDenied'])}{hint}", code=code)
    for codes, statuses, kind, words in _ERRORS:
        if code in codes or status in statuses:
            return kind(f"{what}: {words}", code=code)
    unknown = "not an answer s3kv knows; does endpoint_url name an S3 server?"
    return StoreError(f"{what}: {unknown}", code=code)
