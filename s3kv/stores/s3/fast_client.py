"""The fast client: botocore's signer signs a request, and our own connections send it.

botocore decides the address by its rules (`address`), once, and finds credentials by its chain. It
does not send the requests, which would take two to three times the processor time (decision 14).
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from email.utils import formatdate
from typing import Any
from urllib.parse import quote, urlsplit

from botocore.auth import UNSIGNED_PAYLOAD, S3ExpressAuth, S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.httpsession import get_cert_path

import s3kv
from s3kv.config import Config
from s3kv.place import Place
from s3kv.stores.http.exchange import EMPTY, OBJECT, Request, Response
from s3kv.stores.http.pool import Pool
from s3kv.stores.http.threads import ThreadedPool
from s3kv.stores.http.watch import Patience
from s3kv.stores.s3.address import Address, authority_of, find_address
from s3kv.stores.s3.answers import (
    VERBS,
    Call,
    ListingPage,
    Refusal,
    deletion,
    info_of,
    length_of,
    range_of,
    read_deletion,
    read_error,
    read_page,
)
from s3kv.stores.s3.credentials import Credentials, session_credentials, users_credentials
from s3kv.stores.store import ObjectInfo, Receiver
from s3kv.stores.traffic import Traffic

MIN_BYTES_PER_S = 16 * 2**10
"""Lowest rate of a body; a slower one for `request_timeout_ms` is given up."""
CONTENT_TYPE = "application/octet-stream"
_WRITTEN = (200, 201, 204)
SESSION_SCHEME = "v4-s3express"
SCHEMES = ("v4", SESSION_SCHEME)
"""The ways in which the fast client can sign, in botocore's names."""


class _Signer(S3SigV4Auth):
    """Signer for Signature V4 without a digest of the body. A digest would read every payload once
    more, and chunks carry their own."""

    def payload(self, request: AWSRequest) -> str:
        return str(UNSIGNED_PAYLOAD)


class _SessionSigner(_Signer, S3ExpressAuth):
    """`_Signer` for a directory bucket, where the token goes into another header."""

    def __init__(self, keys: Any, service: str, region: str) -> None:
        # Not S3ExpressAuth's own: it wants botocore's cache of sessions, and ours are elsewhere.
        S3SigV4Auth.__init__(self, keys, service, region)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A bucket's address and credentials; signs requests for it.

    host: name or address to connect to. authority: the header `Host`. path: prefix of a key in the
    request target; ends with a slash. region, service: those that requests are signed for.
    """

    tls: bool
    host: str
    port: int
    authority: str
    path: str
    region: str
    service: str
    signer: type[_Signer]
    credentials: Credentials

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
    ) -> Request:
        """A request without a body, signed with `frozen`, keys of `credentials`. The signature does
        not depend on the body."""
        # Amazon's own escaping: everything but unreserved characters, and '/' in paths.
        target = self.path + quote(key, safe="/-_.~")
        if query:
            pairs = sorted((quote(k, safe="-_.~"), quote(v, safe="-_.~")) for k, v in query.items())
            target += "?" + "&".join(f"{k}={v}" for k, v in pairs)
        unsigned = AWSRequest(
            method, self.url + target, headers={"Host": self.authority, **(headers or {})}
        )
        self.signer(frozen, self.service, self.region).add_auth(unsigned)
        return Request(method, target, {**unsigned.headers, "User-Agent": _AGENT})


_AGENT = f"s3kv/{s3kv.__version__}"


def make_endpoint(config: Config, address: Address) -> tuple[Endpoint, ssl.SSLContext | None]:
    """The fast client's endpoint for this address, and its TLS context (None: plain HTTP). Sends
    nothing."""
    parts = urlsplit(address.url)
    tls = parts.scheme == "https"
    sessions = address.scheme == SESSION_SCHEME
    endpoint = Endpoint(
        tls=tls,
        host=parts.hostname or "",
        port=parts.port or (443 if tls else 80),
        authority=authority_of(address.url),
        path=parts.path,
        region=address.region,
        service=address.service,
        signer=_SessionSigner if sessions else _Signer,
        credentials=session_credentials(config) if sessions else users_credentials(),
    )
    return endpoint, _tls_context(config.verify_tls, address.ca_bundle) if tls else None


def _tls_context(verify: bool, ca_bundle: str | None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=ca_bundle)
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    elif ca_bundle is None:
        # Slim images have no system authorities; botocore brings its own.
        context.load_verify_locations(cafile=get_cert_path(True))
    return context


def patience_of(config: Config) -> Patience:
    """The time limits of the settings."""
    return Patience(
        connect_ms=config.request_timeout_ms // 5,
        first_byte_ms=config.request_timeout_ms // 2,
        progress_ms=config.request_timeout_ms,
        min_bytes_per_s=MIN_BYTES_PER_S,
    )


class FastClient:
    """The fast `S3Client`; its requests cost a fraction of botocore's.

    address: the bucket's, if it is known already; signed with one of `SCHEMES`, and behind no
    proxy. ready: connections that the pool keeps ready if it speaks TLS. Others are opened in a
    round trip. threads: number of threads that move bodies; 1 stands for the caller's own.
    """

    def __init__(
        self, config: Config, address: Address | None = None, *, ready: int = 0, threads: int = 1
    ) -> None:
        self.traffic = Traffic()
        self._config = config
        self._address = address
        self._ready, self._threads = ready, threads
        self._opening = asyncio.Lock()
        self._opened: tuple[Endpoint, Pool | ThreadedPool] | None = None

    async def get(
        self, key: str, place: Place, receiver: Receiver | None, first: int | None = None
    ) -> ObjectInfo:
        bounds = None if first is None else range_of(first, place.nbytes)
        headers = {} if bounds is None else {"Range": bounds}
        response, call = await self._send(
            "s3:GetObject", "GET", key, headers=headers, into=place, receiver=receiver
        )
        told = response.headers
        return info_of(key, length_of(call, bounds, response.nbytes, told), told)

    async def put(self, key: str, place: Place, *, if_absent: bool) -> None:
        headers = {"Content-Type": CONTENT_TYPE}
        if if_absent:
            headers["If-None-Match"] = "*"
        await self._send("s3:PutObject", "PUT", key, headers=headers, body=place)

    async def copy(self, key: str, modified_s: float) -> bool:
        headers = {
            "x-amz-copy-source": quote(f"/{self._config.bucket}/{key}", safe="/-_.~"),
            # A copy onto itself has to change something. These are the headers of every object.
            "x-amz-metadata-directive": "REPLACE",
            "Content-Type": CONTENT_TYPE,
            # Not the ETag as well: with both, a right ETag would be all that counts. A second more,
            # because servers that keep fractions report whole seconds and compare fractions.
            "x-amz-copy-source-if-unmodified-since": formatdate(modified_s + 1, usegmt=True),
        }
        await self._send("s3:PutObject", "PUT", key, headers=headers)
        return True

    async def head(self, key: str) -> ObjectInfo:
        response, _ = await self._send("s3:GetObject", "HEAD", key)
        return info_of(key, int(response.headers.get("content-length", 0)), response.headers)

    async def delete(self, key: str, if_etag: str | None, version: str = "") -> str:
        headers = {"If-Match": if_etag} if if_etag else {}
        query = {"versionId": version} if version else None
        response, _ = await self._send(
            "s3:DeleteObject", "DELETE", key, query=query, headers=headers
        )
        return response.headers.get("x-amz-version-id", "")

    async def delete_batch(self, objects: Sequence[ObjectInfo]) -> Sequence[str]:
        body = deletion(objects)
        # The one digest of a body that every server knows, and that AWS demands here.
        md5 = hashlib.md5(body, usedforsecurity=False).digest()
        headers = {"Content-MD5": base64.b64encode(md5).decode(), "Content-Type": "application/xml"}
        response, call = await self._send(
            "s3:DeleteObject",
            "POST",
            None,
            query={"delete": ""},
            headers=headers,
            body=Place.of(body),
        )
        return read_deletion(response.body, call)

    async def list_page(
        self, prefix: str, keys: int, *, token: str = "", after: str = "", delimiter: str = ""
    ) -> ListingPage:
        where = {"continuation-token": token, "start-after": after, "delimiter": delimiter}
        query = {"list-type": "2", "prefix": prefix, "max-keys": str(keys), "encoding-type": "url"}
        query |= {name: value for name, value in where.items() if value}
        response, call = await self._send("s3:ListBucket", "GET", None, query=query)
        return read_page(response.body, call)

    async def close(self) -> None:
        async with self._opening:
            if self._opened is not None:
                await self._opened[1].close()

    async def _send(
        self,
        action: str,
        method: str,
        key: str | None,
        *,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        body: Place = EMPTY,
        into: Place | None = None,
        receiver: Receiver | None = None,
    ) -> tuple[Response, Call]:
        endpoint, pool = self._opened or await self._open()
        call = Call(action, self._config.bucket, key, endpoint.url, endpoint.region)
        if method == "PUT":
            headers = {**(headers or {}), **(self._config.put_headers or {})}

        verb = "HEAD" if method == "HEAD" else VERBS[action]
        # A server that begins to answer a write before it has finished can only put its error into
        # the body.
        allowed: tuple[int, ...] = _WRITTEN if method in ("PUT", "DELETE") else (200,)
        if "Range" in (headers or {}):
            allowed = OBJECT  # the caller looks at which of the two it is

        async def attempt(frozen: Any) -> Response:
            request = endpoint.sign(frozen, method, key or "", query=query, headers=headers)
            request = replace(request, body=body, into=into, receiver=receiver)
            status: int | None = None
            received_bytes = 0
            try:
                response = await pool.request(request)
                status, received_bytes = response.status, response.nbytes
            finally:
                counts = {"received_bytes": received_bytes, "sent_bytes": body.nbytes}
                self.traffic.note(verb, status, **counts)
            said = read_error(response.body)
            if response.status not in allowed or said:
                region = response.headers.get("x-amz-bucket-region")
                raise Refusal(said, response.status, call, region)
            return response

        return await endpoint.credentials.used(attempt), call

    async def _open(self) -> tuple[Endpoint, Pool | ThreadedPool]:
        """Open endpoint and pool once, however many first requests there are."""
        async with self._opening:
            if self._opened is None:
                address = self._address or find_address(self._config)
                endpoint, tls = make_endpoint(self._config, address)
                self._opened = (endpoint, self._make_pool(endpoint, tls))
                self.traffic.host, self.traffic.region = address.host, endpoint.region
            return self._opened

    def _make_pool(self, endpoint: Endpoint, tls: ssl.SSLContext | None) -> Pool | ThreadedPool:
        def share(number: int) -> int:
            return -(-number // self._threads)

        pools = [
            Pool(
                endpoint.host,
                endpoint.port,
                tls=tls,
                size=share(self._config.pool_size),
                patience=patience_of(self._config),
                ready=share(self._ready) if tls else 0,
            )
            for _ in range(self._threads)
        ]
        return ThreadedPool(pools) if len(pools) > 1 else pools[0]
