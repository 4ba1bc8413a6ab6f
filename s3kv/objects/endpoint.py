"""Where the bucket is and who we are there, as botocore sees it.

botocore decides everything here, once: credentials by its chain, region, endpoint rules,
addressing. What it is not asked to do is send requests: its machinery costs half a millisecond
each. A request is signed with botocore's signer and handed to our own pool.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import parse_qs, quote, urlsplit

import botocore.exceptions
from aiobotocore.config import AioConfig
from aiobotocore.session import AioSession
from botocore.auth import UNSIGNED_PAYLOAD, S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.httpsession import get_cert_path

import s3kv
from s3kv.config import Config
from s3kv.errors import StoreDenied, StoreError
from s3kv.objects.exchange import EMPTY, Request

_MARK = "s3kv-object"


class _Credentials(Protocol):
    async def get_frozen_credentials(self) -> Any: ...


class _Signer(S3SigV4Auth):
    """Signature V4 without a digest of the body: that would read every payload once more, and
    chunks carry their own."""

    def payload(self, request: AWSRequest) -> str:
        return str(UNSIGNED_PAYLOAD)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A bucket's address. Signs requests for it.

    path: what comes before a key in the request target; ends with a slash.
    """

    tls: bool
    host: str
    port: int
    authority: str
    path: str
    region: str
    service: str
    _credentials: _Credentials

    @property
    def url(self) -> str:
        return f"http{'s' if self.tls else ''}://{self.authority}"

    async def sign(
        self,
        method: str,
        key: str,
        *,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        body: memoryview = EMPTY,
    ) -> Request:
        """A signed request. Credentials are asked for each time, because they may expire."""
        # Amazon's own escaping: everything but unreserved characters, and '/' in paths.
        target = self.path + quote(key, safe="/-_.~")
        if query:
            pairs = sorted((quote(k, safe="-_.~"), quote(v, safe="-_.~")) for k, v in query.items())
            target += "?" + "&".join(f"{k}={v}" for k, v in pairs)
        unsigned = AWSRequest(
            method, self.url + target, headers={"Host": self.authority, **(headers or {})}
        )
        frozen = await _frozen(self._credentials)
        _Signer(frozen, self.service, self.region).add_auth(unsigned)
        return Request(method, target, {**unsigned.headers, "User-Agent": _AGENT}, body)


_AGENT = f"s3kv/{s3kv.__version__}"


async def _frozen(credentials: _Credentials) -> Any:
    try:
        return await credentials.get_frozen_credentials()
    except botocore.exceptions.BotoCoreError as error:
        raise StoreDenied(f"the credentials could not be renewed: {error}") from error


async def find_endpoint(config: Config) -> tuple[Endpoint, ssl.SSLContext | None]:
    """Ask botocore where the bucket is. Raises `StoreDenied` without credentials."""
    session = AioSession()
    try:
        credentials = await session.get_credentials()
        if credentials is None:
            raise StoreDenied(
                "no credentials found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
                "AWS_PROFILE, or give this machine a role"
            )
        await _frozen(credentials)  # an expired or unreachable provider is told from here on
        url = await _url_of_mark(session, config)
        ca_bundle = config.ca_bundle or session.get_config_variable("ca_bundle")
    except botocore.exceptions.BotoCoreError as error:
        raise StoreError(f"botocore's settings cannot be used: {error}") from error
    parts = urlsplit(url)
    # …/date/region/service/aws4_request
    scope = parse_qs(parts.query)["X-Amz-Credential"][0].split("/")
    tls = parts.scheme == "https"
    assert parts.hostname is not None
    endpoint = Endpoint(
        tls=tls,
        host=parts.hostname,
        port=parts.port or (443 if tls else 80),
        authority=parts.netloc,
        path=parts.path.removesuffix(_MARK),
        region=scope[-3],
        service=scope[-2],
        _credentials=credentials,
    )
    return endpoint, _tls_context(config.verify_tls, ca_bundle) if tls else None


async def _url_of_mark(session: AioSession, config: Config) -> str:
    """Where botocore would GET an object named `_MARK`, presigned. Sends nothing."""
    style = config.addressing_style
    if style == "auto" and config.endpoint_url is not None:
        style = "path"
    url = await _presign(session, config, style)
    if style == "auto" and "amazonaws." not in urlsplit(url).netloc:
        # The endpoint came from the environment or a profile, where it means the same.
        url = await _presign(session, config, "path")
    return url


async def _presign(session: AioSession, config: Config, style: str) -> str:
    settings = AioConfig(signature_version="s3v4", s3={"addressing_style": style})
    async with session.create_client(
        "s3", region_name=config.region, endpoint_url=config.endpoint_url, config=settings
    ) as client:
        params = {"Bucket": config.bucket, "Key": _MARK}
        return str(await client.generate_presigned_url("get_object", Params=params))


def _tls_context(verify: bool, ca_bundle: str | None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=ca_bundle)
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    elif ca_bundle is None:
        # Slim images have no system authorities; botocore brings its own.
        context.load_verify_locations(cafile=get_cert_path(True))
    return context
