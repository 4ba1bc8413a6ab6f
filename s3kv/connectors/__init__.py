"""The vLLM edge: the only package that imports vLLM, and the only one that may catch everything.

vLLM looks up connector classes here by name (`kv_connector_module_path` and
`ec_connector_module_path`: "s3kv.connectors"). They are imported on first use, so importing the
package is cheap.

    KV             encoder outputs
    kv             ec               vLLM's hooks, passed on to the side of this process
    kv_scheduler   ec_scheduler     the side in the engine-core process
    kv_worker      ec_worker        the side in each worker process
    kv_translate   ec_translate     which models are served; vLLM's objects as s3kv's types

The meaning of keys: `identity` (the namespace) with `model_identity` and `weights`;
`request_hashes` with `media`, and with `adapters` (scheduler) and `adapter_loads` (workers).
Shared by several sides: `telemetry`, `metrics`, `log`, `events` (for routers), `linger`,
`guard` (errors), `worker_memory`; `plugin` registers the connectors.

Importing it raises `ImportError` if another package `s3kv` is in the way, or if vLLM is too old.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import vllm_s3kv

if TYPE_CHECKING:
    from s3kv.connectors.ec import S3ECConnector as S3ECConnector
    from s3kv.connectors.kv import S3KVConnector as S3KVConnector

vllm_s3kv.check(serves_vllm=True)


_MODULES = {"S3KVConnector": "s3kv.connectors.kv", "S3ECConnector": "s3kv.connectors.ec"}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
