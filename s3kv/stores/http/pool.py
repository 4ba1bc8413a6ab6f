"""A small HTTP/1.1 connection pool for bodies received in place (see `connection`).

A host name of S3 has several addresses, each with its own rate; one may be down while the others
serve. A resolver gives all connections that are opened at once the same order, so the pool spreads
them itself, and avoids an address that fails.

A general client copies each body at least once, and a cache moves little but bodies. This pool
connects to one origin, sends bodies with Content-Length, and supports no redirects, cookies or
proxies: behind a proxy `aiobotocore` is used instead (`s3.s3_store`). All of it belongs to one
asyncio (or uvloop) loop.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import socket
import ssl
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

import h11

from s3kv.errors import StoreError, StoreUnavailable
from s3kv.stores.http.connection import Connection, Stale
from s3kv.stores.http.exchange import BadAnswer, Request, Response
from s3kv.stores.http.watch import Patience, Stalled

if sys.version_info >= (3, 11):
    from asyncio import timeout
else:
    from async_timeout import timeout  # type: ignore[import-not-found,unused-ignore]

IDLE_LIMIT_S = 20.0
"""Longest idle time of a connection that is reused. Load balancers drop idle connections
silently, which would show only when a request gets no answer."""
BAD_S = 60.0
"""Time for which an address is tried last after it accepted no connection or gave no answer."""
READY_S = 300.0
"""Time after the last answer for which connections are kept ready: longer than an engine takes from
its check of the bucket to its first request."""
LOOK_S = 5.0
"""Time between two checks of the connections that are kept ready."""
_SocketAddress = tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]
_AddressInfo = tuple[socket.AddressFamily, socket.SocketKind, int, str, _SocketAddress]


class Pool:
    """Connections to one origin.

    tls: None for plain HTTP. size: most connections at once; further requests wait in order until
    their caller gives up. ready: number of connections kept open for the next requests, from the
    first answer until none has come for `READY_S`.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        tls: ssl.SSLContext | None,
        size: int,
        patience: Patience,
        ready: int = 0,
    ) -> None:
        self._host, self._port, self._tls = host, port, tls
        self._addresses = Addresses(host, port)
        self._patience = patience
        self._permits = asyncio.Semaphore(size)
        self._open: set[Connection] = set()
        self._idle: list[Connection] = []
        self._closed = False
        self._ready = min(ready, size)
        self._answered_s = 0.0
        self._keeping: asyncio.Task[None] | None = None

    @property
    def origin(self) -> str:
        return f"http{'s' if self._tls else ''}://{self._host}:{self._port}"

    async def request(self, request: Request) -> Response:
        """Send `request` and return its answer, whatever its status.

        An answer for `request.into` must have a Content-Length. However the call ends, nothing
        writes to `request.into` or reads `request.body` afterwards. Cancelling the call closes its
        connection.

        The request is sent once more on a new connection if an idle one proves to be closed: peers
        close idle connections at any moment. Any other failure raises `StoreUnavailable`; a closed
        pool raises `StoreError`.
        """
        try:
            head = request.head()
        except (h11.LocalProtocolError, UnicodeEncodeError):  # shows the header, perhaps a secret
            told = "HTTP forbids a header: do the credentials end in a line break, or have letters"
            raise StoreError(f"{told} beyond ASCII?") from None
        async with self._permits:
            if (used := self._take_idle()) is not None:
                with suppress(Stale):
                    return await self._run(used, request, head)
            return await self._run(await self._connect(), request, head)

    async def close(self) -> None:
        """End all connections. Requests on those in use raise. Idempotent."""
        self._closed = True
        if (keeping := self._keeping) is not None:
            keeping.cancel()
            await asyncio.wait([keeping])
        ending = list(self._open)
        for connection in ending:
            connection.abort()
        await asyncio.gather(*(connection.closed for connection in ending))

    def _take_idle(self) -> Connection | None:
        if self._closed:
            raise StoreError("this store has been closed")
        oldest_s = asyncio.get_running_loop().time() - IDLE_LIMIT_S
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open and connection.idle_since_s >= oldest_s:
                return connection
            connection.abort()
        return None

    async def _run(self, connection: Connection, request: Request, head: bytes) -> Response:
        try:
            response = await connection.run(request, head)
        except Stale:
            raise
        except BadAnswer as error:
            raise StoreUnavailable(f"{request.method} to {self.origin} failed: {error}") from error
        except Stalled as error:
            self._leave(connection.address)
            raise StoreUnavailable(f"{request.method} to {self.origin} {error}") from error
        if connection.is_open:
            self._idle.append(connection)
        self._answered_s = asyncio.get_running_loop().time()
        if self._ready and self._keeping is None and not self._closed:
            self._keeping = asyncio.get_running_loop().create_task(self._keep_ready())
        return response

    async def _keep_ready(self) -> None:
        """Keep connections ready until no answer has come for `READY_S`, or one cannot be opened.
        The next answer starts this again."""
        loop = asyncio.get_running_loop()
        try:
            while loop.time() < self._answered_s + READY_S:
                await self._renew(loop.time() + LOOK_S - IDLE_LIMIT_S)
                await asyncio.sleep(LOOK_S)
            for connection in self._idle:
                connection.abort()
        except StoreUnavailable:
            pass  # the next request raises it
        finally:
            self._keeping = None

    async def _renew(self, oldest_s: float) -> None:
        """Open connections until `ready` are open, in place of those idle since before `oldest_s`.
        One at a time: most stay ready meanwhile, and requests get their turns in between."""
        for _ in range(self._ready):
            old = next((c for c in self._idle if c.idle_since_s < oldest_s), None)
            if old is not None:
                self._idle.remove(old)
                old.abort()
                await asyncio.wait([old.closed])
            elif len(self._open) >= self._ready:
                return
            async with self._permits:  # or there might be more than `size`
                if len(self._open) < self._ready:
                    connection = await self._connect()
                    connection.rest()
                    self._idle.append(connection)

    def _leave(self, address: str) -> None:
        """Open connections elsewhere for a while, and end idle ones to it if there are others."""
        self._addresses.failed(address)
        if self._addresses.several:
            for connection in self._idle:
                if connection.address == address:
                    connection.abort()

    async def _connect(self) -> Connection:
        tried: list[str] = []
        try:
            async with timeout(self._patience.connect_ms / 1e3):
                return await self._connect_in_order(tried)
        except (OSError, asyncio.TimeoutError) as error:
            if tried:
                self._addresses.failed(tried[-1])
            code, why = why_unreachable(error, self._patience.connect_ms)
            raise StoreUnavailable(f"{self.origin}: {why}", code=code) from error

    async def _connect_in_order(self, tried: list[str]) -> Connection:
        """Connect to the first address that accepts, and append each address tried to `tried`.
        Raises the last address's error; a TLS error at once."""
        addresses = await self._addresses.in_order()
        for address in addresses[:-1]:
            tried.append(address)
            try:
                return await self._connect_to(address)
            except ssl.SSLError:
                raise
            except OSError:
                self._addresses.failed(address)
        tried.append(addresses[-1])
        return await self._connect_to(addresses[-1])

    async def _connect_to(self, address: str) -> Connection:
        self._addresses.taken(address)
        try:
            _, connection = await asyncio.get_running_loop().create_connection(
                lambda: Connection(self._patience, address),
                address,
                self._port,
                ssl=self._tls,
                server_hostname=self._host.rstrip(".") if self._tls else None,
            )
        except BaseException:
            self._addresses.left(address)
            raise

        def ended(_: object) -> None:
            self._open.discard(connection)
            self._addresses.left(address)

        self._open.add(connection)
        connection.closed.add_done_callback(ended)
        return connection


def why_unreachable(error: BaseException, connect_ms: int) -> tuple[str, str]:
    """The reason for a failed connection: code and message of the error to raise. Pure."""
    if isinstance(error, socket.gaierror):
        todo = "check endpoint_url and region"
        return "unresolved", f"the host name cannot be resolved ({error}): {todo}"
    if isinstance(error, ssl.SSLCertVerificationError):
        return "untrusted", (
            f"the server's certificate is not trusted ({error.verify_message}): set ca_bundle "
            "to the authority that signed it"
        )
    if isinstance(error, ssl.SSLError):
        return "no-tls", f"TLS failed ({error.reason}): does endpoint_url name a TLS port?"
    if isinstance(error, asyncio.TimeoutError):
        return "", (
            f"no connection within {connect_ms} ms (a fifth of request_timeout_ms): check "
            "endpoint_url, and whether the network lets it through or needs HTTPS_PROXY"
        )
    # With several addresses asyncio folds their errors into one text.
    if f"[Errno {errno.ECONNREFUSED}]" in str(error):
        return "", f"the connection was refused ({error}): check endpoint_url, is a server there?"
    return "", f"no connection: {error}"


class Addresses:
    """The addresses of `host`. Belongs to one asyncio loop.

    The name is resolved for every connection, so a change of DNS takes effect at once. Addresses
    that failed recently come last. Among the others, the family that the resolver lists first comes
    first, because this host can reach it first; within a family, the address with the fewest
    connections.
    """

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._is_address = _is_address(host)
        self.several = False
        """Whether the name had several addresses at the last lookup."""
        self._connections: Counter[str] = Counter()
        self._bad_until_s: dict[str, float] = {}

    async def in_order(self) -> list[str]:
        """The addresses in the order in which a connection tries them. Raises `OSError`."""
        if self._is_address:
            return [self._host]
        found = await look_up(self._host, self._port)
        families = list(dict.fromkeys(entry[0] for entry in found))
        family_of = {_written(entry[4]): families.index(entry[0]) for entry in found}
        now_s = asyncio.get_running_loop().time()
        self._bad_until_s = {a: end_s for a, end_s in self._bad_until_s.items() if end_s > now_s}
        self.several = len(family_of) > 1
        return sorted(
            family_of, key=lambda a: (a in self._bad_until_s, family_of[a], self._connections[a])
        )

    def taken(self, address: str) -> None:
        """Count a connection or an attempt."""
        self._connections[address] += 1

    def left(self, address: str) -> None:
        """Note the end of a connection, or of an attempt."""
        self._connections[address] -= 1
        if not self._connections[address]:
            del self._connections[address]

    def failed(self, address: str) -> None:
        """Try this address after the others for a while."""
        self._bad_until_s[address] = asyncio.get_running_loop().time() + BAD_S


async def look_up(host: str, port: int) -> Sequence[_AddressInfo]:
    """The resolver's answer. Raises `OSError`."""
    return await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def _written(place: _SocketAddress) -> str:
    """An address as text, with the interface of a link-local one."""
    address = str(place[0])
    return f"{address}%{place[3]}" if len(place) == 4 and place[3] else address
