"""Engines, models and an S3 for the end-to-end tests.

One engine of its own per test where a connector is involved; the references come from engines
without one that are kept for the whole session, one per set of engine arguments.
"""

from __future__ import annotations

import importlib.util
import json
import os
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from lab import models
from lab.engine import Answer, Engine
from lab.s3 import S3Server, moto_process

HERE = Path(__file__).parent
START_AND_STOP_S = 240


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = importlib.util.find_spec("vllm") is None and not os.environ.get("CI")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.e2e)
            # An engine starts in 8 s alone and in 40 s on a machine that is busy.
            item.add_marker(pytest.mark.timeout(START_AND_STOP_S))
            if missing:
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed: make venv"))


@pytest.fixture(scope="session")
def models_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def tiny(models_dir: Path) -> Path:
    """A model with 2 KiB of KV per token, for behaviour."""
    return models.build(models_dir, models.TINY)


@pytest.fixture(scope="session")
def fat(models_dir: Path) -> Path:
    """A model with 64 KiB of KV per token, for transfers."""
    return models.build(models_dir, models.FAT)


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    with moto_process() as server:
        yield server


@pytest.fixture
def bucket(s3: S3Server) -> Iterator[str]:
    """An empty bucket of this test's own."""
    client = s3.client()
    name = f"e2e-{uuid.uuid4().hex}"
    client.create_bucket(Bucket=name)
    yield name
    for key in s3.objects(name):
        client.delete_object(Bucket=name, Key=key)
    client.delete_bucket(Bucket=name)


class References:
    """What a warm run must equal, token for token: the same prompts twice in an engine without a
    connector; the answers of the second pass, where the engine's own cache had the prefix.

    A cold run is no reference: a whole prefill has other matrix shapes than the remainder after a
    hit, bf16 rounds differently, and a greedy token may flip. For the same reason the hit has to
    be as long as the one it is compared with: `hit_tokens`.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._engines: dict[str, Engine] = {}

    def __call__(
        self,
        model: Path,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int = 8,
        hit_tokens: int | None = None,
        **engine_args: Any,
    ) -> list[Answer]:
        engine = self._engine(model, engine_args)
        engine.reset_prefix_cache()
        engine.generate(prompts, max_tokens=max_tokens)
        engine.limit_hits(hit_tokens)
        answers = engine.generate(prompts, max_tokens=max_tokens)
        engine.limit_hits(None)
        return answers

    def _engine(self, model: Path, engine_args: dict[str, Any]) -> Engine:
        name = json.dumps([str(model), engine_args], sort_keys=True)
        if name not in self._engines:
            log = self._directory / f"reference-{len(self._engines)}.log"
            engine = Engine(model, log_path=log, **engine_args)
            engine.start()
            self._engines[name] = engine
        return self._engines[name]

    def close(self) -> None:
        for engine in self._engines.values():
            engine.kill()


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[References]:
    references = References(tmp_path_factory.mktemp("reference"))
    yield references
    references.close()


@pytest.fixture
def connector(s3: S3Server, bucket: str) -> dict[str, Any]:
    """A kv_transfer_config for `bucket`; change `kv_connector_extra_config` as the test needs.

    The engine also needs `env=s3.env`.
    """
    return {
        "kv_connector": "S3KVConnector",
        "kv_connector_module_path": "s3kv.connectors",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "bucket": bucket,
            "endpoint_url": s3.url,
            "host_bytes": "256MiB",
        },
    }
