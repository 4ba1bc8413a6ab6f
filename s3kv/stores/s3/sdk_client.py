"""aiobotocore's client: AWS's SDK, changed only where it violates the contract of `S3Client`.

It serves what the fast client cannot: proxies, and buckets that are named by an ARN. Each request
is watched, counted and sent once, and its errors become ours. See decision 14.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from datetime import datetime, timezone
from functools import partial
from typing import Any, TypeVar

import aiohttp
import botocore.exceptions
import botocore.parsers
from aiobotocore.config import AioConfig
from aiobotocore.credentials import AioCredentials
from aiobotocore.session import AioSession

from s3kv.config import Config
from s3kv.errors import StoreError, StoreUnavailable
from s3kv.place import Place
from s3kv.stores.http.connection import PIECE_BYTES
from s3kv.stores.http.exchange import BadAnswer, whole_of
from s3kv.stores.http.pool import why_unreachable
from s3kv.stores.http.watch import Patience, Stalled, Watch, watched
from s3kv.stores.s3.address import Address, addressing, authority_of
from s3kv.stores.s3.answers import (
    VERBS,
    Call,
    ListingPage,
    Refusal,
    info_of,
    left_by_deletion,
    length_of,
    range_of,
)
from s3kv.stores.s3.credentials import Credentials, users_credentials
from s3kv.stores.s3.fast_client import CONTENT_TYPE, patience_of
from s3kv.stores.store import ObjectInfo, Receiver, landing
from s3kv.stores.traffic import Traffic

T = TypeVar("T")
Parsed = Mapping[str, Any]
"""A parsed answer, as the client returns it."""
_Received = tuple[int, Mapping[str, str]]
"""Length of the body and headers of an answer with an object, whose body is in the place."""
_BROKEN = (
    aiohttp.ClientError,
    botocore.exceptions.HTTPClientError,
    botocore.exceptions.IncompleteReadError,
    BadAnswer,
    OSError,
)
"""Failures of an established connection."""
_FAILURES = (
    *_BROKEN,
    Stalled,
    botocore.exceptions.BotoCoreError,
    botocore.parsers.ResponseParserError,
    ValueError,  # botocore's, for an invalid date
)
"""Failures of a request without an answer, or with an answer that cannot be read."""


class SdkClient:
    """The `S3Client` of AWS's SDK. Belongs to one asyncio loop; opens itself at first use.

    It raises the errors of `FastClient` in the same words. Bodies are copied: a PUT holds up to a
    quarter of a MiB of its object a second time. Timeouts are those of the settings, except that
    connecting and waiting for an answer may together take the sum of both. aiobotocore sends each
    request once; aiohttp sends one without a body once more if its connection is closed. A PUT that
    is redirected raises `StoreUnavailable`; the error of `S3Store.check` names the region.
    """

    def __init__(self, config: Config, address: Address) -> None:
        self.traffic = Traffic()
        self._config, self._address = config, address
        self._patience = patience_of(config)
        self._permits = asyncio.Semaphore(config.pool_size)
        self._session = AioSession()
        self._credentials = users_credentials()
        self._opening = asyncio.Lock()
        self._exit = contextlib.AsyncExitStack()
        self._client: Any = None
        self._closed = False

    async def get(
        self, key: str, place: Place, receiver: Receiver | None, first: int | None = None
    ) -> ObjectInfo:
        bounds = None if first is None else range_of(first, place.nbytes)
        names = {} if bounds is None else {"Range": bounds}

        async def receive(client: Any, watch: Watch) -> _Received:
            answer = await client.get_object(Bucket=self._config.bucket, Key=key, **names)
            watch.wait(self._patience.progress_ms)
            body, headers = answer["Body"], answer["ResponseMetadata"]["HTTPHeaders"]
            try:
                if "content-length" not in headers:
                    raise BadAnswer("an object without Content-Length")
                nbytes = int(headers["content-length"])
                whole = whole_of(bounds, headers, nbytes)
                memory = None if whole is None else landing(place, receiver, nbytes, whole)
                if memory is not None:
                    await _fill(memory, body, watch, receiver)
                return nbytes, headers
            finally:
                body.close()  # ends the connection, unless all of the body has arrived

        nbytes, told = await self._ask("s3:GetObject", key, receive)
        call = self._call("s3:GetObject", key)
        return info_of(key, length_of(call, bounds, nbytes, told), told)

    async def put(self, key: str, place: Place, *, if_absent: bool) -> None:
        more = {"IfNoneMatch": "*"} if if_absent else {}

        async def send(client: Any, watch: Watch) -> None:
            body = _Pieces(place, watch, self._patience) if place.nbytes else b""
            await client.put_object(
                Bucket=self._config.bucket, Key=key, Body=body, ContentType=CONTENT_TYPE, **more
            )

        await self._ask("s3:PutObject", key, send, sent_bytes=place.nbytes)

    async def copy(self, key: str, modified_s: float) -> bool:
        # See `FastClient.copy` for the reasons.
        copy = {
            "CopySource": {"Bucket": self._config.bucket, "Key": key},
            "MetadataDirective": "REPLACE",
            "ContentType": CONTENT_TYPE,
            "CopySourceIfUnmodifiedSince": datetime.fromtimestamp(modified_s + 1, timezone.utc),
        }
        await self._do("s3:PutObject", key, "copy_object", copy)
        return True

    async def head(self, key: str) -> ObjectInfo:
        told = await self._do("s3:GetObject", key, "head_object", {}, verb="HEAD")
        headers = told["ResponseMetadata"]["HTTPHeaders"]
        return info_of(key, int(headers.get("content-length", 0)), headers)

    async def delete(self, key: str, if_etag: str | None, version: str = "") -> str:
        names = {n: v for n, v in (("IfMatch", if_etag), ("VersionId", version)) if v}
        told = await self._do("s3:DeleteObject", key, "delete_object", names)
        return str(told.get("VersionId", ""))

    async def delete_batch(self, objects: Sequence[ObjectInfo]) -> Sequence[str]:
        items = [{"Key": o.key} | ({"ETag": o.etag} if o.etag else {}) for o in objects]
        batch = {"Delete": {"Objects": items, "Quiet": True}}
        told = await self._do("s3:DeleteObject", None, "delete_objects", batch)
        errors = {error["Key"]: error for error in told.get("Errors", ())}
        return left_by_deletion(errors, len(objects), self._call("s3:DeleteObject", None))

    async def list_page(
        self, prefix: str, keys: int, *, token: str = "", after: str = "", delimiter: str = ""
    ) -> ListingPage:
        where = {"ContinuationToken": token, "StartAfter": after, "Delimiter": delimiter}
        names = {"Prefix": prefix, "MaxKeys": keys} | {n: v for n, v in where.items() if v}
        page = await self._do("s3:ListBucket", None, "list_objects_v2", names)
        if "Name" not in page and "KeyCount" not in page:  # botocore takes any document for one
            call = self._call("s3:ListBucket", None)
            raise StoreUnavailable(f"{call}: the listing cannot be read: the answer is not one")
        objects = [
            ObjectInfo(i["Key"], i["Size"], i["LastModified"].timestamp(), i.get("ETag", ""))
            for i in page.get("Contents", ())
        ]
        folders = [item["Prefix"] for item in page.get("CommonPrefixes", ())]
        more = None if page.get("IsTruncated") else ""
        return ListingPage(objects, folders, page.get("NextContinuationToken") or more)

    async def close(self) -> None:
        async with self._opening:
            self._closed = True
            await self._exit.aclose()

    async def _do(
        self, action: str, key: str | None, name: str, names: dict[str, Any], verb: str = ""
    ) -> Parsed:
        """Call one of the client's methods without a body. Raises as `_ask` does."""
        names = {"Bucket": self._config.bucket} | ({} if key is None else {"Key": key}) | names

        async def ask(client: Any, watch: Watch) -> Parsed:
            answer: Parsed = await getattr(client, name)(**names)
            return answer

        return await self._ask(action, key, ask, verb=verb)

    async def _ask(
        self,
        action: str,
        key: str | None,
        work: Callable[[Any, Watch], Coroutine[Any, Any, T]],
        *,
        verb: str = "",
        sent_bytes: int = 0,
    ) -> T:
        """Run `work`, and count it. Raises `Refusal` for an answer that is an error, and
        `StoreError` if there was no answer or the store is closed."""
        if self._closed:
            raise StoreError("this store has been closed")
        client = self._client or await self._open()
        call, verb = self._call(action, key), verb or VERBS[action]

        async def attempt(_: Any) -> T:
            status: int | None = None
            received_bytes = 0
            try:
                async with self._permits:
                    answer = await watched(self._patience, partial(work, client))
                status = 200
                received_bytes = answer[0] if isinstance(answer, tuple) else 0
                return answer
            except botocore.exceptions.ClientError as error:
                refusal = _refusal_of(error, call)
                status = refusal.status
                raise refusal from error
            except _FAILURES as error:
                raise self._why(error, call, verb) from error
            finally:
                counts = {"received_bytes": received_bytes, "sent_bytes": sent_bytes}
                self.traffic.note(verb, status, **counts)

        return await self._credentials.used(attempt)

    def _why(self, error: Exception, call: Call, verb: str) -> StoreError:
        """The error for a request that got no answer, or no readable one."""
        method = "GET" if verb == "LIST" else verb
        origin = self._address.origin
        match error:
            case Stalled():
                return StoreUnavailable(f"{method} to {origin} {error}")
            case botocore.exceptions.ConnectionError():
                root = _root(error)
                # A proxy resolves the store's name, so an unresolved name is the proxy's own.
                unknown = bool(self._address.proxy) and isinstance(root, socket.gaierror)
                if unknown or isinstance(error, botocore.exceptions.ProxyConnectionError):
                    status = getattr(error.kwargs.get("error"), "status", None)
                    did = f"cannot be reached ({root})" if status is None else f"said {status}"
                    why = f"the proxy {self._address.proxy} {did}: check HTTPS_PROXY and NO_PROXY"
                    return StoreUnavailable(f"{origin}: {why}", code="proxy")
                code, why = why_unreachable(root, self._patience.connect_ms)
                return StoreUnavailable(f"{origin}: {why}", code=code)
            case botocore.parsers.ResponseParserError() | ValueError():
                what = "listing" if call.action == "s3:ListBucket" else "answer"
                return StoreUnavailable(f"{call}: the {what} cannot be read: {error}")
            case _ if isinstance(error, _BROKEN):
                return StoreUnavailable(f"{method} to {origin} failed: {error}")
        return StoreError(f"{call}: {error}")

    def _call(self, action: str, key: str | None) -> Call:
        address = self._address
        return Call(action, self._config.bucket, key, address.origin, address.region)

    async def _open(self) -> Any:
        async with self._opening:
            if self._client is None:
                self.traffic.host, self.traffic.region = self._address.host, self._address.region
                self._session.register_component("credential_provider", _Renewed(self._credentials))
                client = await self._exit.enter_async_context(self._make_client())
                client.meta.events.register("before-call.s3", self._as_asked)
                self._client = client
            return self._client

    def _as_asked(self, params: dict[str, Any], context: dict[str, Any], **_: Any) -> None:
        """Adjust a request before it is signed. Waiting for "100 Continue" costs a round trip, and
        hangs if a server does not support it. A bucket in another region is an error, instead of
        two more requests. aiohttp's own `Host` may differ from the signed one."""
        params["headers"].pop("Expect", None)
        params["headers"]["Host"] = authority_of(params["url"])
        if params["method"] == "PUT":
            params["headers"].update(self._config.put_headers or {})
        context.setdefault("s3_redirect", {})["redirected"] = True

    def _make_client(self) -> Any:
        config, proxy_url = self._config, self._address.proxy_url
        return self._session.create_client(
            "s3",
            region_name=config.region,
            endpoint_url=config.endpoint_url,
            verify=config.ca_bundle if config.verify_tls else False,
            config=AioConfig(
                connect_timeout=self._patience.connect_ms / 1e3,
                read_timeout=None,  # `Watch` gives up
                max_pool_connections=config.pool_size,
                retries={"total_max_attempts": 1, "mode": "standard"},
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
                proxies={"http": proxy_url, "https": proxy_url} if proxy_url else {},
                # Objects carry their own digest: no second one of every payload.
                s3=addressing(config) | {"payload_signing_enabled": False},
            ),
        )


def _refusal_of(told: botocore.exceptions.ClientError, call: Call) -> Refusal:
    meta = told.response.get("ResponseMetadata", {})
    status: int = meta.get("HTTPStatusCode", 0)
    said: Mapping[str, Any] = told.response.get("Error", {})
    if said.get("Code") == str(status):  # botocore's, for an answer without a document
        said = {}
    if told.operation_name == "CreateSession":
        call = dataclasses.replace(call, action="s3express:CreateSession", key=None)
    return Refusal(said, status, call, meta.get("HTTPHeaders", {}).get("x-amz-bucket-region"))


class _Pieces:
    """A body that botocore can measure and rewind, and that aiohttp sends piece by piece.

    Each piece is a copy: a connection that is given up may still send pieces that it has, and
    the owner of the memory may have written to it by then.
    """

    def __init__(self, place: Place, watch: Watch, patience: Patience) -> None:
        self._place, self._watch, self._patience = place, watch, patience

    def __len__(self) -> int:
        return self._place.nbytes

    def read(self, size: int = -1) -> bytes:
        raise NotImplementedError("nothing here takes a digest of the body")

    def seek(self, offset: int, whence: int = 0) -> int:
        return offset  # each iteration starts from the front

    def tell(self) -> int:
        return 0

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self._place.pieces(PIECE_BYTES):
            self._watch.wait(self._patience.progress_ms)
            yield bytes(piece)
        # The last piece has been handed over; the kernel may still be sending it.
        wait_ms = self._patience.progress_ms + self._patience.first_byte_ms
        self._watch.wait(wait_ms, for_answer=True)


async def _fill(memory: Place, body: Any, watch: Watch, receiver: Receiver | None) -> None:
    filled = 0
    while filled < memory.nbytes:
        piece = await body.read(min(PIECE_BYTES, memory.nbytes - filled))
        if not piece:
            raise BadAnswer(f"the answer ended after {filled} of {memory.nbytes} bytes")
        memory.write(piece, filled)
        filled += len(piece)
        if receiver is not None:
            receiver.arrived(filled)
        watch.moved(len(piece))


class _Renewed(AioCredentials):  # type: ignore[misc]
    """Credentials of a botocore session and their provider: always our current ones, so that both
    see new ones."""

    def __init__(self, credentials: Credentials) -> None:
        super().__init__("", "", method="s3kv")
        self._source = credentials

    async def load_credentials(self) -> AioCredentials:
        return self

    async def get_frozen_credentials(self) -> Any:
        return await self._source.frozen()


def _root(error: botocore.exceptions.BotoCoreError) -> BaseException:
    """The OS or TLS error inside aiohttp's error, which is inside botocore's."""
    if isinstance(error, botocore.exceptions.ConnectTimeoutError):
        return asyncio.TimeoutError()
    inner = error.kwargs.get("error", error)
    for name in ("certificate_error", "os_error"):
        inner = getattr(inner, name, inner)
    return inner if isinstance(inner, BaseException) else error
