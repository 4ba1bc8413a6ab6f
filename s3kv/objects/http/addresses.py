"""Addresses of one host name, and which of them the next connection goes to.

A name of S3 has several addresses, each with a rate of its own, and an address may be out of order
while the others serve. A resolver gives all connections that are opened at once the same order.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections import Counter
from collections.abc import Sequence

BAD_S = 60.0
"""Time for which an address where a connection or a request failed is tried after the others."""


Place = tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]
Entry = tuple[socket.AddressFamily, socket.SocketKind, int, str, Place]


class Addresses:
    """The addresses of `host`. Belongs to one asyncio loop.

    The resolver is asked for every connection, so that a change of the name counts at once. Of its
    answer the family of the first address is used, and addresses of another one only after those:
    the resolver knows which family this host can reach. The one with the fewest connections goes
    first, and one that has failed last.
    """

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._is_address = _is_address(host)
        self.several = False
        """Whether the name had several addresses when it was last asked for."""
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
        """Count a connection, or the attempt at one."""
        self._connections[address] += 1

    def left(self, address: str) -> None:
        """Note the end of a connection, or of an attempt."""
        self._connections[address] -= 1
        if not self._connections[address]:
            del self._connections[address]

    def failed(self, address: str) -> None:
        """Try this address after the others for a while."""
        self._bad_until_s[address] = asyncio.get_running_loop().time() + BAD_S


async def look_up(host: str, port: int) -> Sequence[Entry]:
    """The resolver's answer. Raises `OSError`."""
    loop = asyncio.get_running_loop()
    return await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def _written(place: Place) -> str:
    """An address as text, with the interface of a link-local one."""
    address = str(place[0])
    return f"{address}%{place[3]}" if len(place) == 4 and place[3] else address
