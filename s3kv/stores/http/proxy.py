"""A proxy between this host and a store: it forwards plain requests, and tunnels TLS (CONNECT)."""

from __future__ import annotations

import asyncio
import base64
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from botocore.httpsession import mask_proxy_url

from s3kv.errors import ConfigError

_MOST_HEAD_BYTES = 2**16


class ProxyRefusal(Exception):
    """The proxy does not open the tunnel. The text is the end of a sentence about it."""


@dataclass(frozen=True, slots=True)
class Proxy:
    """A proxy that is spoken to without TLS. headers: those that every request to it has."""

    host: str
    port: int
    headers: Mapping[str, str]
    name: str
    """Its URL without a password, for people to read."""

    @classmethod
    def of(cls, url: str) -> Proxy:
        """The proxy at a URL. Raises `ConfigError` unless that begins with http://."""
        parts, name = urlsplit(url), str(mask_proxy_url(url))
        if parts.scheme != "http" or not parts.hostname:
            raise ConfigError(
                f"the environment names the proxy {name}: allowed is http://HOST:PORT"
            )
        headers = {}
        if parts.username is not None:
            user = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
            headers["Proxy-Authorization"] = f"Basic {base64.b64encode(user).decode()}"
        return cls(parts.hostname, parts.port or 80, headers, name)

    async def tunnel(self, address: str, authority: str) -> socket.socket:
        """A connection through the proxy to `authority` (host:port). address: one of the proxy's.
        Raises `OSError`, and `ProxyRefusal`."""
        sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        try:
            sock.setblocking(False)
            await asyncio.get_running_loop().sock_connect(sock, (address, self.port))
            await self._open(sock, authority)
        except BaseException:
            sock.close()
            raise
        return sock

    async def _open(self, sock: socket.socket, authority: str) -> None:
        lines = [f"CONNECT {authority} HTTP/1.1", f"Host: {authority}"]
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        loop, head = asyncio.get_running_loop(), b""
        await loop.sock_sendall(sock, "\r\n".join([*lines, "", ""]).encode("latin-1"))
        while b"\r\n\r\n" not in head:
            data = await loop.sock_recv(sock, _MOST_HEAD_BYTES)
            if not data or len(head) > _MOST_HEAD_BYTES:
                raise ProxyRefusal("gave no answer")
            head += data
        status = head.split(b"\r\n")[0].partition(b" ")[2].decode("latin-1")
        if not status.startswith("2"):
            raise ProxyRefusal(f"said {status}")
