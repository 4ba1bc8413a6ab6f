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
from dataclasses import replace
from email.utils import formatdate
from typing import Any
from urllib.parse import quote

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
from s3kv.stores.s3.address import Address, find_address
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
"""Lowest rate of a body. A request that is slower for `request_timeout_ms` is given up."""
CONTENT_TYPE = "application/octet-stream"
_WRITTEN = (200, 201, 204)
SESSION_SCHEME = "v4-s3express"
SCHEMES = ("v4", SESSION_SCHEME)
"""Signature schemes of the fast client, by botocore's names."""


class _Signer(S3SigV4Auth):
    """Signer for Signature V4 without a digest of the body. A digest would read every payload once
    more, and chunks carry their own."""

    def payload(self, request: AWSRequest) -> str:
        return str(UNSIGNED_PAYLOAD)


class _SessionSigner(_Signer, S3ExpressAuth):
    """`_Signer` for a directory bucket, where the token goes into another header."""

    def __init__(self, keys: Any, service: str, region: str) -> None:
        # Not S3ExpressAuth's own: it needs botocore's cache of sessions, and ours are elsewhere.
        S3SigV4Auth.__init__(self, keys, service, region)


def sign(
    address: Address,
    frozen: Any,
    method: str,
    key: str,
    *,
    query: Mapping[str, str] | None = None,
    headers: Mapping[str, str] | None = None,
) -> Request:
    """A request without a body to a bucket, signed with the keys `frozen`. The signature does not
    depend on the body."""
    # Amazon's own escaping: everything but unreserved characters, and '/' in paths.
    target = address.parts.path + quote(key, safe="/-_.~")
    if query:
        pairs = sorted((quote(k, safe="-_.~"), quote(v, safe="-_.~")) for k, v in query.items())
        target += "?" + "&".join(f"{k}={v}" for k, v in pairs)
    with_host = {"Host": address.authority, **(headers or {})}
    unsigned = AWSRequest(method, address.origin + target, headers=with_host)
    signer = _SessionSigner if address.scheme == SESSION_SCHEME else _Signer
    signer(frozen, address.service, address.region).add_auth(unsigned)
    return Request(method, target, {**unsigned.headers, "User-Agent": _AGENT})


_AGENT = f"s3kv/{s3kv.__version__}"


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

    address: the bucket's, if it is known already; it has one of `SCHEMES` and no proxy. ready:
    connections that the pool keeps open if it uses TLS; others take one round trip to open.
    threads: number of threads that move bodies; 1: the caller's own.
    """

    def __init__(
        self, config: Config, address: Address | None = None, *, ready: int = 0, threads: int = 1
    ) -> None:
        self.traffic = Traffic()
        self._config, self._address = config, address
        self._ready, self._threads = ready, threads
        self._opening = asyncio.Lock()
        self._opened: tuple[Address, Credentials, Pool | ThreadedPool] | None = None

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
        headers = {"Content-Type": CONTENT_TYPE} | ({"If-None-Match": "*"} if if_absent else {})
        await self._send("s3:PutObject", "PUT", key, headers=headers, body=place)

    async def copy(self, key: str, modified_s: float) -> bool:
        headers = {
            "x-amz-copy-source": quote(f"/{self._config.bucket}/{key}", safe="/-_.~"),
            # A copy onto itself has to change something. These are the headers of every object.
            "x-amz-metadata-directive": "REPLACE",
            "Content-Type": CONTENT_TYPE,
            # Not the ETag as well: with both, only a matching ETag would count. One second more,
            # because servers that keep fractions report whole seconds but compare fractions.
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
        answer, _ = await self._send("s3:DeleteObject", "DELETE", key, query=query, headers=headers)
        return answer.headers.get("x-amz-version-id", "")

    async def delete_batch(self, objects: Sequence[ObjectInfo]) -> Sequence[str]:
        body = deletion(objects)
        # The only digest of a body that every server supports; AWS requires it here.
        md5 = hashlib.md5(body, usedforsecurity=False).digest()
        headers = {"Content-MD5": base64.b64encode(md5).decode(), "Content-Type": "application/xml"}
        query, place = {"delete": ""}, Place.of(body)
        response, call = await self._send(
            "s3:DeleteObject", "POST", None, query=query, headers=headers, body=place
        )
        return read_deletion(response.body, len(objects), call)

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
                await self._opened[-1].close()

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
        address, credentials, pool = self._opened or await self._open()
        call = Call(action, self._config.bucket, key, address.origin, address.region)
        if method == "PUT":
            headers = {**(headers or {}), **(self._config.put_headers or {})}

        verb = "HEAD" if method == "HEAD" else VERBS[action]
        # A server that begins to answer a write before it has finished can only put its error into
        # the body.
        allowed: tuple[int, ...] = _WRITTEN if method in ("PUT", "DELETE") else (200,)
        if "Range" in (headers or {}):
            allowed = OBJECT  # the caller checks which of the two it is

        async def attempt(frozen: Any) -> Response:
            request = sign(address, frozen, method, key or "", query=query, headers=headers)
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

        return await credentials.used(attempt), call

    async def _open(self) -> tuple[Address, Credentials, Pool | ThreadedPool]:
        """Open the pool once, even for several first requests at a time."""
        async with self._opening:
            if self._opened is None:
                address = self._address or find_address(self._config)
                sessions = address.scheme == SESSION_SCHEME
                credentials = session_credentials(self._config) if sessions else users_credentials()
                self._opened = (address, credentials, self._make_pool(address))
                self.traffic.host, self.traffic.region = address.host, address.region
            return self._opened

    def _make_pool(self, address: Address) -> Pool | ThreadedPool:
        config, parts = self._config, address.parts
        is_tls = parts.scheme == "https"
        tls = _tls_context(config.verify_tls, address.ca_bundle) if is_tls else None

        def share(number: int) -> int:
            return -(-number // self._threads)

        pools = [
            Pool(
                parts.hostname or "",
                parts.port or (443 if is_tls else 80),
                tls=tls,
                size=share(config.pool_size),
                patience=patience_of(config),
                ready=share(self._ready) if is_tls else 0,
            )
            for _ in range(self._threads)
        ]
        return ThreadedPool(pools) if len(pools) > 1 else pools[0]
