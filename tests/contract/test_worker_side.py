"""The worker's side of the connector: what vLLM asks of it besides steps."""

from __future__ import annotations

from typing import Any

import pytest

from s3kv.config import Config
from s3kv.connectors import kv_worker
from s3kv.connectors.kv_messages import WorkerHello
from s3kv.connectors.kv_worker import WorkerSide
from s3kv.connectors.translate import geometry
from tests.contract.configurations import FULL, groups


def side(tiny_config: Any) -> WorkerSide:
    """Made, and not registered."""
    config, cache = Config(bucket="bkt"), groups(FULL)
    return WorkerSide(config, tiny_config, cache, geometry(config, tiny_config, cache))


def test_the_bucket_is_waited_for_at_start_and_not_at_a_wake_up(
    tiny_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[Any] = []
    monkeypatch.setattr(kv_worker, "wait_for_bucket", lambda *args: waited.append(args))
    worker = side(tiny_config)
    worker._client, worker._hello = object(), WorkerHello("n" * 32, 8, 4096)  # type: ignore[assignment]
    assert worker.hello() is worker.hello() is worker._hello
    assert len(waited) == 1
