"""Requests as the engine core makes them, with vLLM's own block hashes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request

from s3kv.connectors.request_hashes import RequestHashes

BLOCK_TOKENS = 16
TOKENS = 10 * BLOCK_TOKENS
_WITHOUT = ("mm_features", "pooling_params", "lora_request", "cache_salt", "data_parallel_rank")


def arriving(**fields: Any) -> EngineCoreRequest:
    """A request on its way to the engine core: a prompt of token ids, unless `fields` say more."""
    given: dict[str, Any] = dict.fromkeys(_WITHOUT) | {
        "request_id": "r",
        "prompt_token_ids": list(range(TOKENS)),
        "sampling_params": SamplingParams(max_tokens=8),
        "arrival_time": 0.0,
    }
    return EngineCoreRequest(**given | fields)


def hashed(arriving: EngineCoreRequest) -> Request:
    """The same in the engine core."""
    if not hasattr(kv_cache_utils, "NONE_HASH"):
        kv_cache_utils.init_none_hash(sha256)
    hasher = kv_cache_utils.get_request_block_hasher(BLOCK_TOKENS, sha256)
    return Request.from_engine_core_request(arriving, hasher)


def hashing(*, trusted: bool = False) -> RequestHashes:
    """The hashes of the requests of an engine. trusted: by the names of media."""
    return RequestHashes(trust_media_names=trusted, block_tokens=BLOCK_TOKENS)


def given(hashes: list[bytes], *features: Any, **more: Any) -> Any:
    """A request with these hashes and media, as far as a connector reads it."""
    plain: dict[str, Any] = {
        "request_id": "r",
        "block_hashes": hashes,
        "num_tokens": BLOCK_TOKENS * len(hashes),
        "skip_reading_prefix_cache": False,
        "lora_request": None,
        "prompt_embeds": None,
        "pooling_params": None,
        "mm_features": list(features),
        "kv_transfer_params": None,
        "sampling_params": None,
    }
    return SimpleNamespace(**plain | more)


def rows(seed: int = 1, *, tokens: int = TOKENS, dtype: torch.dtype = torch.float32) -> Any:
    """Embeddings of a prompt. They are whole numbers, so that every format has them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 8, (tokens, 4), generator=generator).to(dtype)
