from __future__ import annotations

from dataclasses import replace

import botocore.session
import pytest

from s3kv.errors import (
    StoreDenied,
    StoreError,
    StoreMissing,
    StoreRefused,
    StoreThrottled,
    StoreUnavailable,
    StoreUnranged,
)
from s3kv.stores.s3.answers import (
    Call,
    error_about,
    info_of,
    length_of,
    read_deletion,
    read_error,
    read_page,
)

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
        (403, "InvalidAccessKeyId", StoreDenied, "does not know its key"),
        (403, "SignatureDoesNotMatch", StoreDenied, "does not belong to the access key"),
        (400, "ExpiredToken", StoreDenied, "renew the credentials"),
        (403, "RequestTimeTooSkewed", StoreDenied, "clock"),
        (403, "InvalidObjectState", StoreDenied, "archived"),
        (404, "NoSuchBucket", StoreMissing, "create the bucket"),
        (400, "EntityTooLarge", StoreRefused, "takes no such object"),
        (400, "KeyTooLongError", StoreRefused, "takes no such object"),
        (413, None, StoreRefused, "takes no such object"),
        (301, "PermanentRedirect", StoreMissing, "check region"),
        (307, None, StoreMissing, "check region"),
        (503, "SlowDown", StoreThrottled, "throttles requests"),
        (429, None, StoreThrottled, "throttles requests"),
        (400, "RequestTimeout", StoreUnavailable, "sent again"),
        (408, None, StoreUnavailable, "sent again"),
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
    error = error_of(status, code, Message="because")
    assert type(error) is kind
    assert words in str(error)
    assert ("'because'" in str(error)) == (code is not None), "the server's words are passed on"


def test_region_of_the_bucket_is_told() -> None:
    by_body = error_of(400, "AuthorizationHeaderMalformed", Region="eu-west-1")
    assert "'us-east-1', set region to 'eu-west-1'" in str(by_body)
    by_header = error_about({}, 301, CALL, "eu-west-1")
    assert "set region to 'eu-west-1'" in str(by_header)


def test_arns_are_in_the_partition_that_botocore_has_for_the_region() -> None:
    session = botocore.session.Session()
    partitions = session.get_available_partitions()
    assert {"aws", "aws-cn", "aws-us-gov"} <= {*partitions}
    for partition in partitions:
        for region in session.get_available_regions("s3", partition):
            assert f" on arn:{partition}:s3:::bkt/some/key at" in str(replace(CALL, region=region))


@pytest.mark.parametrize("body", [b"", b"no xml", b"<Other><Code>X</Code></Other>", b"<Error>"])
def test_no_error_document(body: bytes) -> None:
    assert read_error(body) == {}


def test_namespaces_do_not_matter() -> None:
    body = b'<Error xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Code>X</Code></Error>'
    assert read_error(body) == {"Code": "X"}


@pytest.mark.parametrize("encoding", ["gb2312", "nonsense"])
@pytest.mark.parametrize("status", [502, 503])
def test_an_error_page_in_an_encoding_nobody_reads_is_an_outage(encoding: str, status: int) -> None:
    """Proxies write such pages, and expat does not know every encoding."""
    page = f'<?xml version="1.0" encoding="{encoding}"?><html>'.encode() + b"\xb4\xed</html>"
    assert read_error(page) == {}
    assert type(error_about(read_error(page), status, CALL)) is StoreUnavailable
    with pytest.raises(StoreUnavailable, match="cannot be read"):
        read_page(page, CALL)
    with pytest.raises(StoreUnavailable, match="cannot be read"):
        read_deletion(page, 1, CALL)


def listing(name: str, encoding: str = "") -> bytes:
    """A page with one object and one folder of this name, written as it is."""
    return (
        '<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        f"{encoding}<Contents><Key>{name}</Key><Size>5</Size>"
        "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
        f"<CommonPrefixes><Prefix>{name}</Prefix></CommonPrefixes></ListBucketResult>"
    ).encode()


URL = "<EncodingType>url</EncodingType>"


@pytest.mark.parametrize(
    ("page", "name"),
    [
        (listing("team+a/b%2Bc%25", URL), "team a/b+c%"),  # as AWS and MinIO write it
        (listing("team%20a/b%2Bc%25", URL), "team a/b+c%"),  # as others do
        (listing("team a/b+c%41"), "team a/b+c%41"),
        (listing("team a/b+c%41", "<EncodingType/>"), "team a/b+c%41"),
    ],
    ids=["plus", "percent", "not encoded", "of no encoding"],
)
def test_names_in_a_listing_are_decoded_if_it_says_that_they_are_encoded(
    page: bytes, name: str
) -> None:
    found = read_page(page, CALL)
    assert [info.key for info in found.objects] == [name]
    assert found.folders == [name]


@pytest.mark.parametrize("date", ["Mon, 01 Jan 99999999999999999999 00:00:00 GMT", "yesterday"])
def test_a_date_beyond_all_calendars_is_no_age(date: str) -> None:
    info = info_of("k", 5, {"last-modified": date, "date": "Mon, 01 Jan 2024 00:00:00 GMT"})
    assert (info.modified_s, info.age_s) == (0.0, None)


def test_a_range_with_thousands_of_digits_is_no_range() -> None:
    """Python refuses to make a number of them."""
    headers = {"content-range": f"bytes 0-4/{'9' * 5000}"}
    with pytest.raises(StoreUnranged):
        length_of(CALL, "bytes=0-4", 5, headers)
