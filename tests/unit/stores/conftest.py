"""Asynchronous tests of this folder run on both loops the package supports.

By day on uvloop, the I/O process's; at night on asyncio's own loop, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import uvloop

HERE = Path(__file__).parent


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"asyncio": asyncio.SelectorEventLoop, "uvloop": uvloop.new_event_loop}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents and "[asyncio" in item.name:
            item.add_marker(pytest.mark.nightly)
