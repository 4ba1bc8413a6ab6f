"""Threads of an I/O process, started before there is any work for them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from s3kv.errors import ConfigError


def started(
    number: int, name: str, initializer: Callable[[], object] | None = None
) -> ThreadPoolExecutor:
    """An executor whose threads all run. By default `submit` starts them: if the system refuses
    one, it raises but keeps the work, which another thread does later, in memory that belongs to
    another job by then. Raises `ConfigError` if the system refuses a thread now."""
    executor, go = ThreadPoolExecutor(number, name, initializer), threading.Event()
    try:
        for _ in range(number):
            executor.submit(go.wait)  # until then, none is idle, and each call starts another
    except RuntimeError as error:
        told = f"the I/O process needs {number} threads ({name}), and the system refuses one"
        raise ConfigError(f"{told}: {error}; raise its limit (ulimit -u, pids.max)") from error
    finally:
        go.set()
    return executor
