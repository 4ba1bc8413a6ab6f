"""Where the bucket is and who we are there, as botocore sees it.

botocore decides everything here, once: credentials by its chain, region, endpoint rules,
addressing. What it is not asked to do is send requests: its machinery costs half a millisecond
each. A request is signed with botocore's signer and handed to our own pool.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit

import botocore.exceptions
from aiobotocore.session import AioSession
from botocore.auth import UNSIGNED_PAYLOAD, S3ExpressAuth, S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.httpsession import get_cert_path

import s3kv
from s3kv.config import Config
from s3kv.errors import StoreError
from s3kv.objects.credentials import Credentials
from s3kv.objects.exchange import EMPTY, Request
from s3kv.objects.sessions import SessionCredentials, zone_of


class _Signer(S3SigV4Auth):
    """Signature V4 without a digest of the body: that would read every payload once more, and
    chunks carry their own."""

    def payload(self, request: AWSRequest) -> str:
        return str(UNSIGNED_PAYLOAD)


class _SessionSigner(S3ExpressAuth):
    """The same for a directory bucket, where the token goes into another header."""

    def __init__(self, keys: Any, region: str) -> None:
        # Not S3ExpressAuth's own: it wants botocore's cache of sessions, and ours are elsewhere.
        S3SigV4Auth.__init__(self, keys, "s3express", region)

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
    credentials: Credentials | SessionCredentials

    @property
    def url(self) -> str:
        return f"http{'s' if self.tls else ''}://{self.authority}"

    def sign(
        self,
        frozen: Any,
        method: str,
        key: str,
        *,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        body: memoryview = EMPTY,
    ) -> Request:
        """A request signed with `frozen`, which `credentials.frozen` gave just now."""
        # Amazon's own escaping: everything but unreserved characters, and '/' in paths.
        target = self.path + quote(key, safe="/-_.~")
        if query:
            pairs = sorted((quote(k, safe="-_.~"), quote(v, safe="-_.~")) for k, v in query.items())
            target += "?" + "&".join(f"{k}={v}" for k, v in pairs)
        unsigned = AWSRequest(
            method, self.url + target, headers={"Host": self.authority, **(headers or {})}
        )
        if isinstance(self.credentials, SessionCredentials):
            _SessionSigner(frozen, self.region).add_auth(unsigned)
        else:
            _Signer(frozen, "s3", self.region).add_auth(unsigned)
        return Request(method, target, {**unsigned.headers, "User-Agent": _AGENT}, body)


_AGENT = f"s3kv/{s3kv.__version__}"


async def find_endpoint(config: Config) -> tuple[Endpoint, ssl.SSLContext | None]:
    """Ask botocore where the bucket is; sends nothing to it. Raises `StoreError`."""
    session = AioSession()
    try:
        ca_bundle = config.ca_bundle or session.get_config_variable("ca_bundle")
        async with session.create_client(
            "s3", region_name=config.region, endpoint_url=config.endpoint_url
        ) as client:
            url, region = client.meta.endpoint_url, client.meta.region_name
    except botocore.exceptions.BotoCoreError as error:
        raise StoreError(f"botocore's settings cannot be used: {error}") from error
    parts = urlsplit(url)
    path = parts.path.rstrip("/") + "/"
    authority, host = parts.netloc, parts.hostname or ""
    zone = zone_of(config.bucket)
    if zone is not None and _on_aws(config, host):
        authority = host = f"s3express-{zone}.{region}.{host[host.index('amazonaws.') :]}"
    if _in_host_name(config, host):
        authority, host = f"{config.bucket}.{authority}", f"{config.bucket}.{host}"
    else:
        path += f"{config.bucket}/"
    tls = parts.scheme == "https"
    port = parts.port or (443 if tls else 80)
    credentials = Credentials(session) if zone is None else SessionCredentials(session, config)
    endpoint = Endpoint(tls, host, port, authority, path, region, credentials)
    return endpoint, _tls_context(config.verify_tls, ca_bundle) if tls else None


def _in_host_name(config: Config, host: str) -> bool:
    """Whether the bucket goes into the host name. auto: on AWS, wherever its certificates allow;
    for any other server, named by a setting or by botocore's own, never."""
    if config.addressing_style != "auto":
        return config.addressing_style == "virtual"
    return _on_aws(config, host) and re.fullmatch(r"[a-z0-9-]+", config.bucket) is not None


def _on_aws(config: Config, host: str) -> bool:
    return config.endpoint_url is None and "amazonaws." in host


def _tls_context(verify: bool, ca_bundle: str | None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=ca_bundle)
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    elif ca_bundle is None:
        # Slim images have no system authorities; botocore brings its own.
        context.load_verify_locations(cafile=get_cert_path(True))
    return context
