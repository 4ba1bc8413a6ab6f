"""A TCP proxy with a rate and with faults on command: `with proxy(s3.url) as p: p.url …`.

Put it between s3kv and any S3 server. It is a process of its own, so that it takes nothing from
the engine's interpreter; passing on 64 MiB/s costs it about an eighth of a core.

    with proxy(s3.url) as p:
        p.limit(4 * 2**20)
        p.fault(Fault(kind="reset_mid_body", verbs=("GET",), times=3))
        p.wait_for("reset_mid_body", count=3)
        p.lift()
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.certificates import self_signed
from lab.faults import Fault
from lab.service import started


@dataclass(frozen=True, slots=True)
class ProxyStatistics:
    """Since the proxy started. requests: begun, by verb. faults: requests a fault struck, by its
    kind; of "refuse" and "certificate" nobody knows how many, so they count once when set.
    bytes_up, bytes_down: of bodies passed on, to the server and from it.
    connections: accepted; open_connections: now."""

    requests: Mapping[str, int]
    faults: Mapping[str, int]
    bytes_up: int
    bytes_down: int
    connections: int
    open_connections: int


class Proxy:
    """The handle of a running proxy. Every call returns when the proxy has done it. One thread."""

    def __init__(self, process: subprocess.Popen[str], scheme: str, address: str) -> None:
        self._process = process
        self.port = int(self._ask({"op": "listen"}))
        self.url = f"{scheme}://{address}:{self.port}"

    def fault(self, fault: Fault) -> None:
        """From now on this fault, in place of any other. Requests under way are left alone,
        unless it is one of connections."""
        self._ask({"op": "fault", "fault": dataclasses.asdict(fault)})

    def lift(self) -> None:
        """No fault for requests that come from now on; what a black hole swallowed stays there."""
        self._ask({"op": "fault", "fault": None})

    def limit(self, bytes_per_s: float | None) -> None:
        """Of bodies, in each direction, all connections together. None: no limit."""
        self._ask({"op": "limit", "bytes_per_s": bytes_per_s})

    def cut(self) -> None:
        """Reset all connections that are open now."""
        self._ask({"op": "cut"})

    def shut_after(self, nbytes: int) -> None:
        """Let so many more bytes through, both directions and all connections together, and then
        none until `open`."""
        self._ask({"op": "shut", "nbytes": nbytes})

    def open(self) -> None:
        self._ask({"op": "shut", "nbytes": None})

    def wait_until_shut(self, timeout_s: float) -> None:
        """Raises AssertionError when fewer bytes came along than were let through."""
        deadline_s = time.monotonic() + timeout_s
        while not self._ask({"op": "is_shut"}):
            assert time.monotonic() < deadline_s, "the proxy was never shut"
            time.sleep(0.01)

    def statistics(self) -> ProxyStatistics:
        return ProxyStatistics(**self._ask({"op": "statistics"}))

    def wait_for(self, kind: str, count: int = 1, timeout_s: float = 200.0) -> None:
        """Until that many requests have been struck by faults of this kind, in all.

        Raises AssertionError when that does not happen in time.
        """
        deadline_s = time.monotonic() + timeout_s
        while (struck := self.statistics().faults.get(kind, 0)) < count:
            assert time.monotonic() < deadline_s, f"{kind} struck {struck} of {count} requests"
            time.sleep(0.01)

    def _ask(self, command: Mapping[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the proxy has ended ({self._process.wait()}); see its stderr")
        return json.loads(answer)


@contextmanager
def proxy(
    upstream_url: str,
    *,
    certificate: Path | None = None,
    wrong_certificate: Path | None = None,
    address: str = "127.0.0.1",
) -> Iterator[Proxy]:
    """A proxy to the plain-HTTP server at `upstream_url`, on a free port, until the block ends.

    certificate: a PEM file with certificate and key; the proxy then speaks TLS to its clients.
    wrong_certificate: what the fault "certificate" uses in its place. address: it listens there.
    """
    certificates = str(certificate or ""), str(wrong_certificate or "")
    with started("lab.proxying", upstream_url, address, *certificates) as process:
        yield Proxy(process, "https" if certificate else "http", address)


@contextmanager
def plain_and_tls(url: str, home: Path) -> Iterator[dict[str, Any]]:
    """Proxies before a server: "http", "https", and the "ca_bundle" of the second. home: an empty
    folder for the certificates, one of which names another host."""
    good, bad = self_signed(home / "good", "IP:127.0.0.1"), self_signed(home / "bad", "DNS:no.test")
    with proxy(url) as plain, proxy(url, certificate=good, wrong_certificate=bad) as tls:
        yield {"http": plain, "https": tls, "ca_bundle": f"{good}.crt"}
