from __future__ import annotations

import pytest

from s3kv.errors import (
    StoreDenied,
    StoreError,
    StoreMissing,
    StoreRefused,
    StoreThrottled,
    StoreUnavailable,
)
from s3kv.objects.s3.answers import Call, error_about, read_error

CALL = Call("s3:GetObject", "bkt", "some/key", "http://host:1", "us-east-1")


def error_of(status: int, code: str | None, **members: str) -> StoreError:
    """The error for an answer with this status and an error document of these members."""
    if code is None:
        return error_about(read_error(b"<html>not S3</html>"), status, CALL)
    inner = "".join(f"<{k}>{v}</{k}>" for k, v in {"Code": code, **members}.items())
    body = f'<?xml version="1.0" encoding="UTF-8"?><Error>{inner}</Error>'
    return error_about(read_error(body.encode()), status, CALL)


@pytest.mark.parametrize(
    ("status", "code", "kind", "words"),
    [
        (403, "AccessDenied", StoreDenied, "grant the action; without s3:ListBucket on"),
        (403, None, StoreDenied, "s3:GetObject on arn:aws:s3:::bkt/some/key at http://host:1"),
        (401, None, StoreDenied, "401"),
        (403, "InvalidAccessKeyId", StoreDenied, "does not know this access key"),
        (403, "SignatureDoesNotMatch", StoreDenied, "secret key does not belong"),
        (400, "ExpiredToken", StoreDenied, "renew the credentials"),
        (403, "RequestTimeTooSkewed", StoreDenied, "clock"),
        (403, "InvalidObjectState", StoreDenied, "archived"),
        (404, "NoSuchBucket", StoreMissing, "create the bucket"),
        (400, "EntityTooLarge", StoreRefused, "takes no such object"),
        (400, "KeyTooLongError", StoreRefused, "takes no such object"),
        (413, None, StoreRefused, "takes no such object"),
        (301, "PermanentRedirect", StoreMissing, "look at region"),
        (307, None, StoreMissing, "look at region"),
        (503, "SlowDown", StoreThrottled, "fewer requests"),
        (429, None, StoreThrottled, "fewer requests"),
        (400, "RequestTimeout", StoreUnavailable, "sent again"),
        (409, "ConditionalRequestConflict", StoreUnavailable, "sent again"),
        (500, "InternalError", StoreUnavailable, "server failed"),
        (503, None, StoreUnavailable, "server failed"),
        (501, "NotImplemented", StoreError, "endpoint_url"),
        (400, "InvalidArgument", StoreError, "InvalidArgument"),
        (405, None, StoreError, "(no code)"),
        (200, None, StoreError, "not an answer s3kv knows"),
    ],
)
def test_kinds(status: int, code: str | None, kind: type[StoreError], words: str) -> None:
    error = error_of(status, code)
    assert type(error) is kind
    assert words in str(error)


def test_region_of_the_bucket_is_told() -> None:
    by_body = error_of(400, "AuthorizationHeaderMalformed", Region="eu-west-1")
    assert "'us-east-1', set region to 'eu-west-1'" in str(by_body)
    by_header = error_about({}, 301, CALL, "eu-west-1")
    assert "set region to 'eu-west-1'" in str(by_header)


def test_what_the_server_says_is_passed_on() -> None:
    assert "'because'" in str(error_of(400, "Odd", Message="because"))


@pytest.mark.parametrize("body", [b"", b"no xml", b"<Other><Code>X</Code></Other>", b"<Error>"])
def test_no_error_document(body: bytes) -> None:
    assert read_error(body) == {}


def test_namespaces_do_not_matter() -> None:
    body = b'<Error xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Code>X</Code></Error>'
    assert read_error(body) == {"Code": "X"}
