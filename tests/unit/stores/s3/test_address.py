"""Where requests go, compared with the request that aiobotocore's own client would send."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any
from urllib.parse import unquote

import botocore.exceptions
import pytest
from aiobotocore.awsrequest import AioAWSResponse
from aiobotocore.config import AioConfig
from aiobotocore.session import AioSession

from s3kv.config import Config
from s3kv.errors import ConfigError, StoreError
from s3kv.stores.s3.address import find_address
from s3kv.stores.s3.answers import Refusal
from s3kv.stores.s3.credentials import users_credentials
from s3kv.stores.s3.fast_client import sign
from s3kv.stores.s3.sdk_client import SdkClient
from tests import servers

ACCOUNT = "123456789012"
SCOPE = re.compile(r"Credential=\w+/\d+/(\S+)/aws4_request")
REGIONS = ("us-east-1", "eu-central-1", "us-gov-west-1", "cn-north-1")
ENDPOINTS = (
    None,
    "http://store.example:9000",
    "https://store.example/base",
    "https://vpce-1a2b.s3.eu-central-1.vpce.amazonaws.com",
)


class Nothing:
    """The body of an answer that has none."""

    def __aiter__(self) -> Any:
        return self

    async def read(self) -> bytes:
        return b""


def intercept(client: Any) -> list[Any]:
    """Have the client's requests answered before they are sent. Returns a list for them."""
    requests: list[Any] = []

    async def answer(request: Any, **_: Any) -> AioAWSResponse:
        requests.append(request)
        return AioAWSResponse(request.url, 200, {"content-length": "0"}, Nothing())

    client.meta.events.register("before-send.s3", answer)
    return requests


async def sent_by_aiobotocore(config: Config) -> tuple[str, str, str]:
    """URL, region and service of its GET of the key "a b"."""
    style = config.addressing_style
    async with AioSession().create_client(
        "s3",
        region_name=config.region,
        endpoint_url=config.endpoint_url,
        config=AioConfig(s3={} if style == "auto" else {"addressing_style": style}),
    ) as client:
        requests = intercept(client)
        await client.get_object(Bucket=config.bucket, Key="a b")
    (request,) = requests
    authorization = in_text(request.headers["Authorization"])
    (scope,) = SCOPE.findall(authorization)
    if authorization.startswith("AWS4-ECDSA-P256-SHA256"):  # Signature Version 4A
        return request.url, in_text(request.headers["X-Amz-Region-Set"]), scope
    region, service = scope.split("/")
    return request.url, region, service


def in_text(header: str | bytes) -> str:
    return header if isinstance(header, str) else header.decode()


async def sent_by_us(config: Config) -> tuple[str, str, str]:
    address = find_address(config)
    request = sign(address, await users_credentials().frozen(), "GET", "a b")
    (scope,) = SCOPE.findall(request.headers["Authorization"])
    assert request.headers["Host"] == address.authority
    region, service = scope.split("/")
    return address.origin + request.target, region, service


def outcome(find: Any, config: Config) -> tuple[str, ...]:
    """What was found, or that there is no such endpoint."""
    try:
        found: tuple[str, ...] = asyncio.run(find(config))
    except (StoreError, botocore.exceptions.BotoCoreError):  # ours wraps botocore's
        return ("refused",)
    return found


def as_aws_allows(bucket: str, endpoint_url: str | None) -> str:
    is_aws = endpoint_url is None or "amazonaws" in endpoint_url
    return bucket.lower().replace("_", "-") if is_aws else bucket


BUCKETS = itertools.cycle(("bkt", "b.k.t", "Bkt_1", "point-1a2b3c-s3alias", "bkt"))
TABLE = [
    *itertools.product(REGIONS, ENDPOINTS[:1], ["auto"], ["true", "false"], ["true", "false"]),
    *itertools.product(REGIONS, ENDPOINTS[:1], ["path", "virtual"], ["false"], ["false"]),
    *itertools.product(
        REGIONS[1:2], ENDPOINTS[1:], ["auto", "path", "virtual"], ["false"], ["false"]
    ),
    ("eu-central-1", ENDPOINTS[1], "auto", "true", "false"),
    ("eu-central-1", ENDPOINTS[3], "auto", "false", "true"),
]


@pytest.mark.parametrize("row", [(*row, as_aws_allows(next(BUCKETS), row[1])) for row in TABLE])
def test_requests_go_where_botocores_go(row: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    region, endpoint_url, style, fips, dual_stack, bucket = row
    monkeypatch.setenv("AWS_USE_FIPS_ENDPOINT", fips)
    monkeypatch.setenv("AWS_USE_DUALSTACK_ENDPOINT", dual_stack)
    config = Config(bucket=bucket, region=region, endpoint_url=endpoint_url, addressing_style=style)
    ours = outcome(sent_by_us, config)
    assert ours == outcome(sent_by_aiobotocore, config)
    # China has no endpoints by that standard; where an endpoint is given it counts for nothing.
    assert (ours == ("refused",)) == (region == "cn-north-1" and fips == "true")


@pytest.mark.parametrize(
    ("region", "fips", "dual_stack", "expected"),
    [
        ("us-east-1", "false", "false", "https://bkt.s3.amazonaws.com/"),
        ("us-east-1", "true", "false", "https://bkt.s3-fips.us-east-1.amazonaws.com/"),
        ("us-east-1", "true", "true", "https://bkt.s3-fips.dualstack.us-east-1.amazonaws.com/"),
        ("eu-central-1", "false", "true", "https://bkt.s3.dualstack.eu-central-1.amazonaws.com/"),
        ("us-gov-west-1", "true", "false", "https://bkt.s3-fips.us-gov-west-1.amazonaws.com/"),
        ("cn-north-1", "false", "false", "https://bkt.s3.cn-north-1.amazonaws.com.cn/"),
    ],
)
def test_addresses_on_aws(
    region: str, fips: str, dual_stack: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As AWS documents them, for the case that botocore changes its mind."""
    monkeypatch.setenv("AWS_USE_FIPS_ENDPOINT", fips)
    monkeypatch.setenv("AWS_USE_DUALSTACK_ENDPOINT", dual_stack)
    address = find_address(Config(bucket="bkt", region=region))
    assert (address.url, address.region, address.service) == (expected, region, "s3")


@pytest.mark.parametrize(
    "bucket",
    ["My-Bucket", "my_bucket", "my..bucket", "bucket-", "xn--bucket", "1.2.3.4", "ab", "a" * 64],
)
def test_a_name_that_aws_refuses(bucket: str) -> None:
    with pytest.raises(ConfigError, match=rf"bucket is '{bucket}', a name that AWS refuses"):
        find_address(Config(bucket=bucket))
    other = Config(bucket=bucket, endpoint_url="http://127.0.0.1:9")
    assert bucket in find_address(other).url


@pytest.mark.parametrize("bucket", ["abc", "1a.b-c.9", "a" * 63, "b--use1-az4--x-s3"])
def test_a_name_that_aws_accepts(bucket: str) -> None:
    assert bucket in find_address(Config(bucket=bucket, region="us-east-1")).url


@pytest.mark.parametrize(
    ("environment", "settings"),
    [
        ({"AWS_ENDPOINT_URL_S3": "http://h:9"}, {}),
        ({"AWS_ENDPOINT_URL": "http://h:9"}, {"addressing_style": "virtual"}),
        ({"AWS_ENDPOINT_URL": "http://h:9", "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": "true"}, {}),
        ({"AWS_DEFAULT_REGION": "eu-north-1"}, {}),
        ({"AWS_S3_US_EAST_1_REGIONAL_ENDPOINT": "regional"}, {}),
        ({"AWS_DEFAULT_REGION": ""}, {}),
        ({"AWS_DEFAULT_REGION": "", "AWS_USE_FIPS_ENDPOINT": "true"}, {}),
    ],
)
def test_the_environment_counts(
    environment: dict[str, str], settings: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name)
    config = Config(bucket="bkt", **settings)
    assert outcome(sent_by_us, config) == outcome(sent_by_aiobotocore, config)


@pytest.mark.parametrize(
    "section",
    ["use_accelerate_endpoint = true", "addressing_style = path", "use_dualstack_endpoint = true"],
)
def test_the_profile_counts(section: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config").write_text(f"[default]\ns3 =\n  {section}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    config = Config(bucket="bkt", region="eu-west-1")
    ours = outcome(sent_by_us, config)
    assert ours == outcome(sent_by_aiobotocore, config)
    assert ours != ("https://bkt.s3.eu-west-1.amazonaws.com/a%20b", "eu-west-1", "s3")


POINT = f"arn:aws:s3:eu-west-1:{ACCOUNT}:accesspoint/chunks"
OUTPOST = f"arn:aws:s3-outposts:us-west-2:{ACCOUNT}:outpost/op-01234567890123456/accesspoint/chunks"
MULTI_REGION = f"arn:aws:s3::{ACCOUNT}:accesspoint/mfzwi23gnjvgw.mrap"


@pytest.mark.parametrize(
    ("bucket", "region", "expected"),
    [
        (POINT, "eu-west-1", f"https://chunks-{ACCOUNT}.s3-accesspoint.eu-west-1.amazonaws.com/"),
        (POINT, "us-east-1", f"https://chunks-{ACCOUNT}.s3-accesspoint.eu-west-1.amazonaws.com/"),
        (
            OUTPOST,
            "us-west-2",
            f"https://chunks-{ACCOUNT}.op-01234567890123456.s3-outposts.us-west-2.amazonaws.com/",
        ),
    ],
)
def test_access_points(bucket: str, region: str, expected: str) -> None:
    config = Config(bucket=bucket, region=region)
    address = find_address(config)
    assert address.url == expected
    ours = (address.url + "a%20b", address.region, address.service)
    assert ours == outcome(sent_by_aiobotocore, config)
    copied = asyncio.run(first_of_the_sdks(config, lambda client: client.copy("a b", 1e9)))
    assert unquote(in_text(copied.headers["x-amz-copy-source"])) == f"{bucket}/object/a b"


def test_a_multi_region_access_point() -> None:
    """Without awscrt the error says what to install."""
    config = Config(bucket=MULTI_REGION, region="eu-west-1")
    if importlib.util.find_spec("awscrt") is None:
        with pytest.raises(ConfigError, match=r"Version 4A.*pip install 'botocore\[crt\]'"):
            find_address(config)
        return
    address = find_address(config)
    sent = outcome(sent_by_aiobotocore, config)
    assert sent == (address.url + "a%20b", address.region, address.service)
    assert address.url == "https://mfzwi23gnjvgw.mrap.accesspoint.s3-global.amazonaws.com/"
    assert (address.scheme, address.region, address.service) == ("v4a", "*", "s3")


def test_no_credentials_are_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is anything else asked on a network, which would hang where there is none."""
    servers.forget_credentials(monkeypatch)
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("a socket was opened"))
    assert find_address(Config(bucket="bkt")).host == "bkt.s3.amazonaws.com"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("AWS_PROFILE", "nowhere"),
        ("AWS_ENDPOINT_URL", "no url"),
        ("AWS_ENDPOINT_URL", "http://me:Pa/55@store?"),
    ],
)
def test_settings_of_botocores_that_cannot_be_used(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A password in them is not repeated."""
    monkeypatch.setenv(name, value)
    with pytest.raises(StoreError, match="botocore's settings cannot be used") as caught:
        find_address(Config(bucket="bkt"))
    assert "Pa" not in str(caught.value)
    assert caught.value.code == "botocore", "for the remedy"


def test_authorities_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_CA_BUNDLE", "/no/file")
    with pytest.raises(ConfigError, match=r"AWS_CA_BUNDLE.*/no/file.*allowed is a file of cert"):
        find_address(Config(bucket="bkt"))


PROXY = {"HTTPS_PROXY": "http://user:secret@proxy.example:3128", "HTTP_PROXY": "plain.example:80"}


@pytest.mark.parametrize(
    ("environment", "endpoint_url", "proxy"),
    [
        ({}, None, ""),
        (PROXY, None, "http://***:***@proxy.example:3128"),
        (PROXY, "http://store.example:9000", "http://plain.example:80"),
        ({"https_proxy": "http://lower.example:1"}, None, "http://lower.example:1"),
        ({"HTTP_PROXY": "http://plain.example:80"}, None, ""),
        ({**PROXY, "NO_PROXY": "amazonaws.com"}, None, ""),
        ({**PROXY, "NO_PROXY": "bkt.s3.amazonaws.com"}, None, ""),
        ({**PROXY, "NO_PROXY": "s3.amazonaws.com,x"}, None, ""),
        ({**PROXY, "no_proxy": ".amazonaws.com"}, None, ""),
        ({**PROXY, "NO_PROXY": "*"}, "https://store.example", ""),
        ({**PROXY, "NO_PROXY": "other.example"}, None, "http://***:***@proxy.example:3128"),
    ],
)
def test_the_proxy_is_the_environments(
    environment: dict[str, str],
    endpoint_url: str | None,
    proxy: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert find_address(Config(bucket="bkt", endpoint_url=endpoint_url)).proxy == proxy


FORMS = [
    ("http://store.example:80", "store.example"),
    ("https://store.example:443", "store.example"),
    ("http://store.example:443", "store.example:443"),
    ("https://store.example:80", "store.example:80"),
    ("https://Store.EXAMPLE:9000/Base", "store.example:9000"),
    ("https://store.example.:443", "store.example"),
    ("https://store.example.", "store.example"),
    ("http://[2001:DB8::1]:80", "[2001:db8::1]"),
    ("http://[2001:db8::1]:9000", "[2001:db8::1]:9000"),
    ("http://[fe80::1%25eth0]:80", "[fe80::1]"),
    ("http://192.0.2.1:80", "192.0.2.1"),
]


@pytest.mark.parametrize("style", ["path", "virtual"])
@pytest.mark.parametrize(("endpoint_url", "host"), FORMS)
async def test_the_host_is_signed_as_front_ends_write_it(
    endpoint_url: str, host: str, style: str
) -> None:
    """Of what both clients send, by the first request of each: `Host`, and that it is signed."""
    config = Config(bucket="bkt", endpoint_url=endpoint_url, addressing_style=style)
    address = find_address(config)
    ours = sign(address, await users_credentials().frozen(), "GET", "k")
    sent = await first_of_the_sdks(config)
    if style == "virtual" and host.startswith("store"):
        host = f"bkt.{host}"
    assert [ours.headers["Host"], in_text(sent.headers["Host"])] == [host, host]
    for headers in (ours.headers, sent.headers):
        assert "SignedHeaders=host;" in in_text(headers["Authorization"])
    assert address.origin == f"{endpoint_url.partition(':')[0]}://{host}"


async def first_of_the_sdks(
    config: Config, ask: Callable[[SdkClient], Awaitable[object]] = lambda client: client.head("k")
) -> Any:
    """The first request of our SDK client."""
    client = SdkClient(config, find_address(config))
    requests = intercept(await client._open())
    with suppress(Refusal, StoreError):  # the answer to a copy has a body
        await ask(client)
    await client.close()
    return requests[0]


@pytest.mark.parametrize("variable", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
@pytest.mark.parametrize("url", ["http://me:Pa55@store", "https://Pa55@store:443/base"])
def test_a_user_in_the_environments_endpoint_is_refused(
    variable: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, url)
    with pytest.raises(ConfigError, match=r"AWS_ENDPOINT_URL.*\*\*\*@store.*allowed") as caught:
        find_address(Config(bucket="bkt"))
    assert "Pa55" not in str(caught.value)


def test_a_directory_bucket_takes_no_headers() -> None:
    headers = {"x-amz-server-side-encryption": "aws:kms"}
    with pytest.raises(ConfigError, match=r"put_headers is .*directory bucket"):
        find_address(Config(bucket="b--use1-az4--x-s3", put_headers=headers))
