"""Prompts with pictures, and engines with the EC connector that serve them."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lab import vision
from lab.engine import Ask, Engine
from lab.s3 import S3Server
from s3kv.objects.item_format import HEADER_BYTES

VISION: dict[str, Any] = {
    "skip_tokenizer_init": False,
    "max_model_len": 1024,
    "kv_cache_memory_bytes": 2**26,
    "enable_prefix_caching": False,
}
TEXT = [10, 11, 12, 13]
ITEM_BYTES = HEADER_BYTES + vision.QUERY_TOKENS * vision.HIDDEN * 2


def ask(*images: int, **more: Any) -> Ask:
    return Ask(TEXT, images=images, **more)


def ec_connector(
    s3: S3Server, bucket: str, role: str = "ec_both", **settings: Any
) -> dict[str, Any]:
    """Waits for every item however slow the machine is, so that hits do not depend on time."""
    extra = {
        "bucket": bucket,
        "endpoint_url": s3.url,
        "host_bytes": "16MiB",
        "recompute_gate": False,
        "max_wait_ms": 250_000,
        # Ranks that wait for each other leave a busy machine's server without a processor.
        "request_timeout_ms": 480_000,
    }
    return {
        "ec_connector": "S3ECConnector",
        "ec_connector_module_path": "s3kv.connectors",
        "ec_role": role,
        "ec_connector_extra_config": extra | settings,
    }


class Pictures:
    """`with pictures(connector) as engine`: an engine with a model that sees. Before it is shut
    down it is audited: nothing may be left of its requests."""

    def __init__(self, s3: S3Server, model: Path, logs: Path) -> None:
        self._s3 = s3
        self._model = model
        self._logs = logs
        self._count = 0

    @contextlib.contextmanager
    def __call__(self, ec: dict[str, Any] | None, **engine_args: Any) -> Iterator[Engine]:
        self._count += 1
        log = self._logs / f"engine-{self._count}.log"
        arguments = VISION | engine_args
        engine = Engine(self._model, ec_connector=ec, log_path=log, env=self._s3.env, **arguments)
        with engine:
            yield engine
            reachable = engine_args.get("in_process", True)
            if ec is not None and ec["ec_role"] != "ec_producer" and reachable:
                report = engine.call("lab.audit:audit_items")
                assert report["broken"] == [], report
                assert not any(report["left"].values()), report


def counters(engine: Engine) -> Counter[str]:
    """Of the EC connector, whatever their labels."""
    prefix, suffix = "vllm:s3kv_ec_", "_total"
    counters: Counter[str] = Counter()
    for sample, value in engine.metrics().items():
        name, _, _ = sample.partition("{")
        if name.startswith(prefix) and name.endswith(suffix) and value:
            counters[name[len(prefix) : -len(suffix)]] += int(value)
    return counters
