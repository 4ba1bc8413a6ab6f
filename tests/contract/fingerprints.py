"""An engine as a fingerprint sees it: vLLM's own configuration objects, and changes to them."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lab import models
from s3kv.config import Config
from s3kv.connectors.identity import ENVIRONMENT, fingerprint, offload_fingerprint
from s3kv.connectors.kv_translate import geometry
from tests.contract.configurations import FULL, groups

PAGE: dict[str, Any] = {"chunk_blocks": 2, "layers": [{"dtype": "BF16", "order": "HNC"}]}


class Engine:
    """What a fingerprint is taken of. Changes to vLLM's objects go through `patch`."""

    def __init__(self, vllm_config: Any, patch: pytest.MonkeyPatch) -> None:
        self.patch = patch
        self.config = Config(bucket="kv-cache")
        self.vllm = vllm_config
        self.cache = groups(FULL)
        self.page = PAGE
        self.set(self.vllm.compilation_config, static_forward_context={"layer.0": layer("CPU")})

    def set(self, holder: Any, **values: Any) -> None:
        for name, value in values.items():
            # Around pydantic, which would want whole configurations where a name is enough.
            self.patch.setitem(holder.__dict__, name, value)

    def fingerprint(self) -> dict[str, Any]:
        sizes = geometry(self.config, self.vllm, self.cache)
        return fingerprint(self.config, self.vllm, self.cache, sizes, self.page)

    def offload_fingerprint(self, row_bytes: int = 4096, **changes: Any) -> dict[str, Any]:
        return offload_fingerprint(self.config, self.vllm, rows(**changes), row_bytes)

    @property
    def folder(self) -> Path:
        return Path(self.model.model)

    @property
    def model(self) -> Any:
        return self.vllm.model_config

    def settings(self, **settings: Any) -> None:
        self.config = dataclasses.replace(self.config, **settings)


def layer(backend: str) -> Any:
    return SimpleNamespace(attn_backend=SimpleNamespace(get_name=lambda: backend))


def an_engine(vllm_config: Any, patch: pytest.MonkeyPatch, directory: Path, folder: Path) -> Engine:
    """An engine of a model of this test's own, whose name does not tell where it lies."""
    shutil.copytree(models.build(directory, models.TINY), folder)
    patch.delenv("PYTHONHASHSEED", raising=False)
    for name in ENVIRONMENT:
        patch.delenv(name, raising=False)
    it = Engine(vllm_config, patch)
    it.set(it.model, model=str(folder))
    it.settings(model_id="tiny")
    return it


def leaves(tree: Any, depth: int = 2) -> dict[str, Any]:
    """Field -> value, down to the second level."""
    if depth == 0 or not isinstance(tree, dict):
        return {"": tree}
    return {
        f"{key}.{name}".rstrip("."): value
        for key, item in tree.items()
        for name, value in leaves(item, depth - 1).items()
    }


def sees(**settings: Any) -> Callable[[Engine], None]:
    """A multi-modal model. vLLM's object is not needed: a fingerprint reads names off it."""
    return lambda e: e.set(e.model, multimodal_config=SimpleNamespace(**settings))


def drafts(e: Engine, **settings: Any) -> None:
    """With a draft model in a folder of its own, the same model under another path."""
    folder = e.folder.parent / "draft"
    shutil.copytree(e.folder, folder, dirs_exist_ok=True)
    draft = SimpleNamespace(**e.model.__dict__ | {"model": str(folder)})
    spoken = {"method": "draft_model", "draft_model_config": draft} | settings
    e.set(e.vllm, speculative_config=SimpleNamespace(**spoken))


def rows(**changes: Any) -> Any:
    """vLLM's configuration of offloading."""
    parallel = {"world_size": 1, "tp_size": 1, "pp_size": 1, "pcp_size": 1, "dcp_size": 1}
    parallel["is_parallelism_agnostic"] = changes.pop("is_agnostic", False)
    parallel |= changes.pop("parallel", {})
    group = SimpleNamespace(
        tokens_per_block=changes.pop("tokens", 16), layer_names=changes.pop("layers", ("0", "1"))
    )
    cache = SimpleNamespace(
        blocks_per_chunk=changes.pop("blocks", 8), tokens_per_hash=changes.pop("hashed", 16)
    )
    same = {"replicated_layout": False, "canonical_layout": False, "kv_cache_layout": "NHD"}
    return SimpleNamespace(
        groups=(group,), cache=cache, parallel=SimpleNamespace(**parallel), **{**same, **changes}
    )
