"""`ObjectStore` on S3 and everything that speaks its protocol.

Requests: GET, PUT, HEAD, DELETE and a copy onto itself of an object, ListObjectsV2, and for tools
DeleteObjects. So an IAM policy needs s3:GetObject, s3:PutObject, s3:DeleteObject and s3:ListBucket;
for a directory bucket, which wants a session first (`sessions`), s3express:CreateSession instead.
Objects are written with one PUT, so 5 GiB is the largest; a chunk is thousands of times smaller.

Integrity of content is not this layer's: chunks carry a digest (`codec`). With the setting
`checksum` at when_supported, a PUT also carries a CRC-32 for the server to verify.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import hashlib
import logging
import zlib
from collections.abc import AsyncIterator, Mapping, Sequence
from email.utils import formatdate
from functools import partial
from urllib.parse import quote

from s3kv.config import Config
from s3kv.errors import StoreError
from s3kv.objects import documents
from s3kv.objects.answers import (
    Call,
    error_about,
    error_of,
    info_of,
    read_error,
    refuses_credentials,
)
from s3kv.objects.connection import Patience
from s3kv.objects.endpoint import Endpoint, find_endpoint
from s3kv.objects.exchange import EMPTY, Request, Response
from s3kv.objects.http import Pool
from s3kv.objects.store import Claim, ObjectInfo
from s3kv.objects.traffic import Traffic

_log = logging.getLogger("s3kv.io")

PAGE_KEYS = 1000
"""Keys per page of a listing; the most S3 gives."""
MAX_PUT_BYTES = 5 * 2**30
_CONTENT_TYPE = "application/octet-stream"
_VERBS = {"GET": "LIST", "POST": "DELETE"}
"""What requests on the bucket itself are counted as."""


class S3Store:
    """A bucket on an S3 server. Belongs to one asyncio loop; opens itself at first use.

    Each method makes one attempt, on a new connection when an idle one proves to be closed, and
    raises `StoreThrottled`, `StoreUnavailable`, `StoreDenied`, `StoreMissing`, or `StoreError`
    for an answer no S3 server should give. A PUT with `if_absent` that was sent twice because the
    server closed an idle connection may find its own first copy, and then returns False. When the
    store refuses our credentials and others have come meanwhile (a file was rewritten), it is asked
    once more with those.

    Some servers do not know `If-None-Match`. Those that ignore it create the object again. Those
    that refuse it (501, or 400 for no other reason) are sent plain PUTs from then on. With either,
    `put` with `if_absent` always returns True: what it writes must not depend on who was first.
    """

    def __init__(self, config: Config, *, page_keys: int = PAGE_KEYS) -> None:
        self.traffic = Traffic()
        self._config = config
        self._page_keys = page_keys
        self._conditional_puts: bool | None = None
        """Whether the server knows them; None: not found out yet."""
        self._knows_batches = True
        self._opening = asyncio.Lock()
        self._opened: tuple[Endpoint, Pool] | None = None

    def __repr__(self) -> str:
        return f"S3Store({self._config.bucket!r} at {self._config.endpoint_url or 'AWS'})"

    async def get_into(
        self, key: str, buffer: memoryview, claim: Claim | None = None
    ) -> ObjectInfo | None:
        response, call = await self._send("s3:GetObject", "GET", key, into=buffer, claim=claim)
        if response.status == 200:
            return info_of(key, response.nbytes, response.headers)
        if _is_no_such_key(response):
            return None
        raise error_of(response, call)

    async def put(self, key: str, data: memoryview, *, if_absent: bool) -> bool:
        """Raises `ValueError` for more than 5 GiB."""
        if len(data) > MAX_PUT_BYTES:
            raise ValueError(f"{len(data)} bytes do not fit into one PUT ({MAX_PUT_BYTES})")
        conditional = if_absent and self._conditional_puts is not False
        response, call = await self._put(key, data, conditional=conditional)
        if conditional and response.status == 412:
            self._conditional_puts = True
            return False
        if conditional and self._conditional_puts is None and response.status in (400, 501):
            refusal = error_of(response, call)
            if type(refusal) is StoreError:
                response, call = await self._put(key, data, conditional=False)
                if _is_written(response):
                    self._conditional_puts = False
                    _log.warning("%s. From now on plain PUTs are sent there", refusal)
        if _is_written(response):
            return True
        raise error_of(response, call)

    async def _put(self, key: str, data: memoryview, *, conditional: bool) -> tuple[Response, Call]:
        headers = {"Content-Type": _CONTENT_TYPE}
        if conditional:
            headers["If-None-Match"] = "*"
        if self._config.checksum == "when_supported":
            crc = zlib.crc32(data).to_bytes(4, "big")
            headers["x-amz-checksum-crc32"] = base64.b64encode(crc).decode()
        return await self._send("s3:PutObject", "PUT", key, headers=headers, body=data)

    async def refresh(self, key: str, modified_s: float) -> bool:
        headers = {
            "x-amz-copy-source": quote(f"/{self._config.bucket}/{key}", safe="/-_.~"),
            # A copy onto itself has to change something. These are the headers of every object.
            "x-amz-metadata-directive": "REPLACE",
            "Content-Type": _CONTENT_TYPE,
            # Not the ETag as well: with both, a right ETag would be all that counts. A second more,
            # because servers that keep fractions tell and compare differently.
            "x-amz-copy-source-if-unmodified-since": formatdate(modified_s + 1, usegmt=True),
        }
        response, call = await self._send("s3:PutObject", "PUT", key, headers=headers)
        if response.status == 412 or _is_no_such_key(response):
            return False
        if _is_written(response):
            return True
        raise error_of(response, call)

    async def head(self, key: str) -> ObjectInfo | None:
        response, call = await self._send("s3:GetObject", "HEAD", key)
        if response.status == 404:  # without a body: a missing bucket looks the same
            return None
        if response.status != 200:
            raise error_of(response, call)
        return info_of(key, int(response.headers["content-length"]), response.headers)

    async def delete(self, key: str, *, if_etag: str | None = None) -> bool:
        headers = {"If-Match": if_etag} if if_etag else {}
        response, call = await self._send("s3:DeleteObject", "DELETE", key, headers=headers)
        if response.status == 501 and headers:
            return await self.delete(key)
        if response.status == 412 and headers:
            return False
        if response.status not in (200, 204) and not _is_no_such_key(response):
            raise error_of(response, call)
        return True

    async def delete_many(self, objects: Sequence[ObjectInfo]) -> Sequence[str]:
        if self._knows_batches:
            response, call = await self._delete_batch(objects)
            if response.status == 200:
                return _left(response.body, call)
            refusal = error_of(response, call)
            if type(refusal) is not StoreError:
                raise refusal
            self._knows_batches = False
            _log.warning("%s. From now on objects are deleted there one by one", refusal)
        gone = await asyncio.gather(*(self.delete(o.key, if_etag=o.etag) for o in objects))
        return [o.key for o, went in zip(objects, gone, strict=True) if not went]

    async def _delete_batch(self, objects: Sequence[ObjectInfo]) -> tuple[Response, Call]:
        body = documents.deletion(objects)
        # The one digest of a body that every server knows, and that AWS demands here.
        md5 = hashlib.md5(body, usedforsecurity=False).digest()
        headers = {"Content-MD5": base64.b64encode(md5).decode(), "Content-Type": "application/xml"}
        return await self._send(
            "s3:DeleteObject",
            "POST",
            None,
            query={"delete": ""},
            headers=headers,
            body=memoryview(body),
        )

    async def list(self, prefix: str, after: str = "") -> AsyncIterator[ObjectInfo]:
        token: str | None = None
        while True:
            infos, token = await self._list_page(prefix, self._page_keys, token, after)
            for info in infos:
                yield info
            if token is None:
                return

    async def folders(self, prefix: str, limit: int) -> Sequence[str]:
        query = _list_query(prefix, limit) | {"delimiter": "/"}
        response, call = await self._send("s3:ListBucket", "GET", None, query=query)
        if response.status != 200:
            raise error_of(response, call)
        return documents.read_folders(response.body, call, prefix)

    async def check(self) -> None:
        # A listing rather than a HEAD of the bucket: its errors have a body that says which.
        await self._list_page(f"{self._config.prefix}/", 1, None)

    async def close(self) -> None:
        async with self._opening:
            if self._opened is not None:
                await self._opened[1].close()

    async def _list_page(
        self, prefix: str, keys: int, token: str | None, after: str = ""
    ) -> tuple[Sequence[ObjectInfo], str | None]:
        query = _list_query(prefix, keys)
        if token is not None:
            query["continuation-token"] = token
        elif after:
            query["start-after"] = after
        response, call = await self._send("s3:ListBucket", "GET", None, query=query)
        if response.status != 200:
            raise error_of(response, call)
        return documents.read_page(response.body, call)

    async def _send(
        self,
        action: str,
        method: str,
        key: str | None,
        *,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        body: memoryview = EMPTY,
        into: memoryview | None = None,
        claim: Claim | None = None,
    ) -> tuple[Response, Call]:
        endpoint, pool = self._opened or await self._open()
        call = Call(action, self._config.bucket, key, endpoint.url, endpoint.region)
        sign = partial(
            endpoint.sign, method=method, key=key or "", query=query, headers=headers, body=body
        )
        verb = _VERBS.get(method, method) if key is None else method
        frozen = await endpoint.credentials.frozen()
        response = await self._counted(verb, pool, sign(frozen), into, claim)
        if refuses_credentials(response) and await endpoint.credentials.differ_from(frozen):
            frozen = await endpoint.credentials.frozen()
            response = await self._counted(verb, pool, sign(frozen), into, claim)
        return response, call

    async def _counted(
        self,
        verb: str,
        pool: Pool,
        request: Request,
        into: memoryview | None,
        claim: Claim | None,
    ) -> Response:
        try:
            response = await pool.request(request, into, claim)
        except BaseException:
            self.traffic.note(verb, None)
            raise
        self.traffic.note(
            verb, response.status, received_bytes=response.nbytes, sent_bytes=len(request.body)
        )
        return response

    async def _open(self) -> tuple[Endpoint, Pool]:
        """Find credentials and endpoint once, however many first requests there are."""
        async with self._opening:
            if self._opened is None:
                endpoint, tls = await find_endpoint(self._config)
                pool = Pool(
                    endpoint.host,
                    endpoint.port,
                    tls=tls,
                    size=self._config.pool_size,
                    patience=Patience(
                        connect_ms=self._config.connect_timeout_ms,
                        first_byte_ms=self._config.first_byte_timeout_ms,
                        progress_ms=self._config.request_timeout_ms,
                        min_bytes_per_s=self._config.min_bytes_per_s,
                    ),
                )
                self._opened = (endpoint, pool)
                self.traffic.host, self.traffic.region = endpoint.host, endpoint.region
            return self._opened


def _is_written(response: Response) -> bool:
    # A server that begins to answer before it has finished can only put its error into the body.
    return response.status in (200, 201, 204) and not read_error(response.body)


def _is_no_such_key(response: Response) -> bool:
    return response.status == 404 and read_error(response.body).get("Code") != "NoSuchBucket"


def _left(body: bytes, call: Call) -> Sequence[str]:
    """What a deletion has left because it had changed. Raises what it failed with otherwise."""
    left: list[str] = []
    for key, said in documents.read_deletion(body, call).items():
        if said.get("Code") in ("PreconditionFailed", "ConditionalRequestConflict"):
            left.append(key)
        elif said.get("Code") != "NoSuchKey":
            raise error_about(said, 200, dataclasses.replace(call, key=key))
    return left


def _list_query(prefix: str, keys: int) -> dict[str, str]:
    return {"list-type": "2", "prefix": prefix, "max-keys": str(keys), "encoding-type": "url"}
