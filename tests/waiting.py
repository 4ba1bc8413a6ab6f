"""Waits for what nothing announces."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


async def until(true: Callable[[], object]) -> None:
    """Let the loop run until it is true."""
    while not true():  # noqa: ASYNC110 - nobody sets an event
        await asyncio.sleep(0.001)


def wait_until(what: str, true: Callable[[], object], timeout_s: float = 250.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline_s, f"never happened: {what}"
        time.sleep(0.02)
