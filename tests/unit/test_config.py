"""A wrong setting is told by name, with what it was and what is allowed."""

from __future__ import annotations

import dataclasses
import pickle
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from s3kv.config import KEYS_VARIABLE, REMOVED, Config, allowed, parse_bytes
from s3kv.errors import ConfigError
from tests.project import ROOT

ENCRYPTION = "x-amz-server-side-encryption"
NO_BUCKETS = [
    "s3://kv-cache",
    "kv-cache/team-a",
    "-",
    "arn:aws:s3:::kv-cache",
    "arn:aws:s3:eu-west-1:1:accesspoint/chunks",
    "",
    "a b",
    "kv-cache\n",
]
NO_URLS = [
    "localhost:9000",
    "s3://kv-cache",
    "http://",
    "https://store?list-type=2",
    "https://store/base?",
    "https://store#top",
    "https://store:",
    "https://store:0",
    "https://store:port",
    "https://[::1",
    "https://store\\base",
    "https://store;a",
    "https:// a",
    "https://store/a b",
]
BUCKETS = [
    "kv-cache",
    "Kv_Cache.1",
    "chunks-1a2b3c4d-s3alias",
    "cache--use1-az4--x-s3",
    "arn:aws:s3:eu-west-1:123456789012:accesspoint/chunks",
    "arn:aws-cn:s3:cn-north-1:123456789012:accesspoint:chunks",
    "arn:aws:s3::123456789012:accesspoint/mfzwi23gnjvgw.mrap",
    "arn:aws:s3-outposts:us-west-2:123456789012:outpost/op-0123/accesspoint/chunks",
]
URLS = [
    "http://store:80",
    "https://STORE.Example.:443/base/",
    "http://[::1]:9000",
    "http://[fe80::1%25eth0]:9000",
    "http://127.0.0.1:65535",
]


DURATIONS = ("refresh_after_s", "bucket_idle_s", "drain_timeout_s")


def parse(**settings: Any) -> Config:
    return Config.parse({"bucket": "kv-cache", **settings})


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("max_inflight_requests", 0),
        ("max_inflight_requests", "3"),
        ("max_inflight_requests", True),
        ("max_inflight_requests", 1.5),
        ("chunk_tokens", -1),
        ("host_bytes", "4 elephants"),
        ("host_bytes", "1KiB"),
        ("bucket_bytes", "16777216TiB"),  # of 64 bits, which messages to the I/O process have
        ("max_wait_ms", 2**64),
        ("disk_path", "/tmp/a\0b"),
        ("host_bytes", "9" * 400),
        ("host_bytes", None),
        ("client", "boto3"),
        ("client", None),
        ("verify_tls", "yes"),
        ("verify_tls", 1),
        ("refresh_after_s", float("nan")),
        *((name, float("inf")) for name in DURATIONS),
        ("refresh_after_s", "20"),
        ("on_unavailable", "retry"),
        ("compress", "yes"),
        ("compress", True),
        ("addressing_style", "subdomain"),
        ("region", 1),
        ("bucket", 1),
        *(("encryption", value) for value in ("on", "aes", "AES-GCM", True, None)),
        ("encryption_keys_file", 1),
        *(("bucket", value) for value in NO_BUCKETS),
        *(("prefix", value) for value in ("", "/", "/team-a", "team-a/", "a\0b", "\ud800")),
        *(("endpoint_url", value) for value in NO_URLS),
        *(
            ("put_headers", value)
            for value in (
                f"{ENCRYPTION}: AES256",
                {"X-Amz-Acl": "private"},
                {f"{ENCRYPTION}-customer-algorithm": "AES256"},
                {"content-type": "text/plain"},
                {"x-amz-copy-source": "/a/b"},
                {ENCRYPTION: ""},
                {ENCRYPTION: "AES256\r\nx-amz-acl: private"},
                {ENCRYPTION: "AES256 "},
                {f"{ENCRYPTION}-bucket-key-enabled": True},
                {"x-amz-storage-class": "GLACIER"},
                {"x-amz-storage-class": "DEEP_ARCHIVE"},
                {"x-amz-acl": "public-read"},
                {"x-amz-acl": "authenticated-read"},
            )
        ),
    ],
)
def test_a_wrong_value_is_told_with_what_is_allowed(setting: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(**{setting: value})
    assert str(caught.value) == f"{setting} is {value!r}: allowed is {allowed(setting)}"


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        *(("bucket", value) for value in BUCKETS),
        *(("endpoint_url", value) for value in URLS),
        *(
            ("put_headers", value)
            for value in (
                {ENCRYPTION: "AES256"},
                {
                    ENCRYPTION: "aws:kms",
                    f"{ENCRYPTION}-aws-kms-key-id": "arn:aws:kms:eu-west-1:111122223333:key/1-2",
                    f"{ENCRYPTION}-bucket-key-enabled": "true",
                },
                {"x-amz-acl": "bucket-owner-full-control", "x-amz-storage-class": "GLACIER_IR"},
                {},
                None,
            )
        ),
    ],
)
def test_an_allowed_value_stays_as_it_is(setting: str, value: Any) -> None:
    assert getattr(parse(**{setting: value}), setting) == value


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("buket", "bucket"), ("hostbytes", "host_bytes"), ("max_wait", "max_wait_ms")],
)
def test_an_unknown_setting_is_told_with_the_nearest(wrong: str, right: str) -> None:
    told = f"unknown setting '{wrong}' in the settings; did you mean '{right}'?"
    with pytest.raises(ConfigError, match=f"^{re.escape(told)}$"):
        parse(**{wrong: 1})


@pytest.mark.parametrize("name", ["zebra", "x", "cache_size_in_megabytes_of_the_gpu"])
def test_only_a_near_name_is_suggested(name: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown setting '{name}'.*Known: .*bucket") as raised:
        parse(**{name: 1})
    assert "did you mean" not in str(raised.value)


@pytest.mark.parametrize("name", REMOVED)
def test_a_removed_setting_is_told_with_the_reason(name: str) -> None:
    told = f"{name} in the settings was removed: {REMOVED[name]}"
    with pytest.raises(ConfigError, match=f"^{re.escape(told)}$"):
        parse(**{name: 1})
    for page in re.findall(r"docs/[\w/.-]+\.md", told):
        assert (ROOT / page).is_file()


def test_a_missing_bucket_is_told() -> None:
    with pytest.raises(ConfigError, match="bucket is missing"):
        Config.parse({"prefix": "team-a"})


@pytest.mark.parametrize(
    "url",
    [
        "http://me:Pa55@store:9000",
        "http://Pa55@store",
        "https://me:Pa/55@store",
        "https://me:Pa?55@store",
        "https://me:7/Pa55@store",
        "https://me:Pa@55@store",
        "https://me:Pa 55@store",
        "https://me:Pa//55@store",
        "me:Pa55@store:9000",
        ["http://me:Pa55@store"],
    ],
)
def test_a_password_in_an_endpoint_is_refused_and_not_repeated(url: Any) -> None:
    with pytest.raises(ConfigError, match=r"endpoint_url is .*store.*: allowed is") as caught:
        parse(endpoint_url=url)
    assert not re.search("Pa|55|me:", str(caught.value))


def test_a_ca_bundle_is_a_file() -> None:
    with pytest.raises(ConfigError, match="ca_bundle is '/no/such/file'"):
        parse(ca_bundle="/no/such/file")


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("4GiB", 2**32), ("500 MB", 500_000_000), ("1.5gib", 3 * 2**29), ("0.1b", 1), ("7", 7)],
)
def test_bytes_may_have_a_unit(text: str, nbytes: int) -> None:
    assert parse_bytes(text) == parse(bucket_bytes=text).bucket_bytes == nbytes


@pytest.mark.parametrize("text", ["4ib", "GiB", "-1GiB", "1e9", "4 GiB each", ""])
def test_other_text_is_no_number_of_bytes(text: str) -> None:
    assert parse_bytes(text) is None
    with pytest.raises(ConfigError, match=f"host_bytes is '{text}': allowed is a number of bytes"):
        parse(host_bytes=text)


def test_the_constructor_checks_as_parse_does() -> None:
    with pytest.raises(ConfigError, match="timeout_ms is 0: allowed is a whole number, 1 or more"):
        Config(bucket="kv-cache", request_timeout_ms=0)
    with pytest.raises(ConfigError, match="client is 'never': allowed is 'auto' or"):
        dataclasses.replace(parse(), client="never")  # type: ignore[arg-type]


def test_only_objects_that_are_verified_are_compressed() -> None:
    with pytest.raises(ConfigError, match="compress is 'on', and integrity is 'none'"):
        parse(compress="on", integrity="none")
    for compress in ("auto", "off"):
        assert parse(compress=compress, integrity="none").compress == compress


def test_encryption_is_off_and_its_keys_are_no_part_of_the_settings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Settings are sent to other processes, and logged."""
    assert parse().encryption == "off"
    monkeypatch.setenv(KEYS_VARIABLE, "0123456789abcdef" * 4)
    (tmp_path / "keys").write_text("fedcba9876543210" * 4)
    config = parse(encryption="aes-gcm", encryption_keys_file=str(tmp_path / "keys"))
    assert config.encryption_keys_file == str(tmp_path / "keys")
    for shown in (repr(config), repr(pickle.dumps(config)), repr(msgspec.msgpack.encode(config))):
        assert "0123456789" not in shown
        assert "fedcba" not in shown
    assert allowed("encryption") == "'off' or 'aes-gcm'"


def test_every_default_is_allowed() -> None:
    config = parse()
    assert config == Config(bucket="kv-cache")
    assert dataclasses.replace(config) == config


def test_as_many_fetches_at_once_as_requests_and_bytes_allow() -> None:
    config = parse(max_inflight_requests=100)
    assert config.fetches_at_once(1) == 100
    assert config.fetches_at_once(2**24) == 64
    assert config.fetches_at_once(2**31) == 1
    assert config.pool_size == 200, "each may be sent a second time"


@pytest.mark.parametrize(
    ("host", "staging"), [("1MiB", 2**20), ("512MiB", 2**26), ("4GiB", 2**28), ("16GiB", 2**30)]
)
def test_encoder_outputs_get_a_sixteenth_of_host_memory_for_saves(host: str, staging: int) -> None:
    assert parse(host_bytes=host).staging_bytes == staging
