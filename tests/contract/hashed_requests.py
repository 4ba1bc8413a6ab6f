"""Requests as the engine core makes them, with vLLM's own block hashes."""

from __future__ import annotations

from typing import Any

import torch
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request

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


def rows(seed: int = 1, *, tokens: int = TOKENS, dtype: torch.dtype = torch.float32) -> Any:
    """Embeddings of a prompt. They are whole numbers, so that every format has them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 8, (tokens, 4), generator=generator).to(dtype)
