"""A tiered KV cache for vLLM: GPU, pinned host memory, S3.

The package exports the library's names: `from s3kv import Config, TieredStore`. It imports their
modules at first use, because the I/O process imports this package and needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from s3kv.config import Config
    from s3kv.library.tiered_store import TieredStore
    from s3kv.types import Location

__version__ = "0.1.0"

__all__ = ["Config", "Location", "TieredStore"]

_MODULES = {
    "Config": "s3kv.config",
    "Location": "s3kv.types",
    "TieredStore": "s3kv.library.tiered_store",
}

_BROUGHT_BY_VLLM = ("numpy", "torch")


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_MODULES[name]), name)
    except ModuleNotFoundError as error:
        if error.name not in _BROUGHT_BY_VLLM:
            raise
        raise ImportError(
            f"s3kv.{name} needs the package {error.name}, which vLLM brings along; without vLLM: "
            "pip install 'vllm-s3kv[torch]'"
        ) from error


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
