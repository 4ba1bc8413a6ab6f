"""Asynchronous tests of this folder run on both loops the package supports.

By day on uvloop, the I/O process's; at night on asyncio's own loop, too. And a server with TLS.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import uvloop

from tests import servers

HERE = Path(__file__).parent


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"asyncio": asyncio.SelectorEventLoop, "uvloop": uvloop.new_event_loop}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents and "[asyncio" in item.name:
            item.add_marker(pytest.mark.nightly)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-signed certificate for 127.0.0.1, with its key in the same file."""
    return servers.self_signed(tmp_path_factory.mktemp("tls") / "server.pem", "IP:127.0.0.1")


@pytest.fixture
def server_tls(certificate: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    return context
