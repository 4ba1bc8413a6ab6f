"""Memory effects that only exist on a CPU, taken out of measurements."""

from __future__ import annotations

from typing import Any


def touch_kv_cache(engine: Any) -> int:
    """For `Engine.call`: write to every page of the engine's KV cache; returns its bytes.

    On a CPU the cache is memory that the kernel has only promised. Whoever writes to a page first
    pays for it: the forward of a first prefill, or the load of a first hit, and never again.
    """
    executor = engine.engine_core.engine_core.model_executor
    caches = executor.driver_worker.worker.model_runner.kv_caches
    for cache in caches:
        cache.zero_()
    return sum(cache.nbytes for cache in caches)
