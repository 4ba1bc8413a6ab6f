"""Run in the engine's process, by `Engine.call`: requests with all that vLLM lets a client ask for.

The requests of one call are served together, and nothing else meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from vllm import PoolingParams, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine.llm_engine import LLMEngine

Ask = dict[str, Any]
Reply = dict[str, Any]


def serve(
    engine: LLMEngine, asks: list[Ask], reset_at: int | None = None, connector: bool = False
) -> list[Reply]:
    """Serve `asks`, and return a reply to each, as JSON values.

    An ask has a `prompt` (token ids), or `embeds`: the seed and the length of one, or both, and
    the `mask` of the positions at which the ids count. It may have
    `sampling` (fields of vLLM's `SamplingParams`, and a `regex`), `salt`, `adapter` (name, number,
    path), `priority`, and `after`: the tokens that all others have before it comes.
    reset_at: when all requests have so many tokens, preempt them and reset the prefix cache; with
    `connector` the connector's, too.

    A reply has the tokens of each of the `choices`, the number of `cached` prompt tokens, and the
    `logprobs` of the prompt's tokens if they were asked for.
    """
    replies: list[Reply] = [{} for _ in asks]
    late = sorted(range(len(asks)), key=lambda number: asks[number].get("after", 0))
    has_reset = reset_at is None
    while late or engine.has_unfinished_requests():
        while late and asks[late[0]].get("after", 0) <= _produced(engine):
            number = late.pop(0)
            _add(engine, str(number), asks[number])
        if reset_at is not None and not has_reset and _produced(engine) >= reset_at:
            has_reset = engine.reset_prefix_cache(True, connector)
        for output in _step(engine):
            replies[int(output.request_id)] = _reply(output)
    assert has_reset, "the requests were over before the reset"
    return replies


def embed(engine: LLMEngine, prompts: list[list[int]]) -> list[Reply]:
    """Embed `prompts` one after another. A reply has the `embedding` and the `cached` tokens."""
    replies = []
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), {"prompt_token_ids": prompt}, PoolingParams(task="embed"))
        while engine.has_unfinished_requests():
            for output in _step(engine):
                embedding = output.outputs.data.tolist()
                replies.append({"embedding": embedding, "cached": output.num_cached_tokens})
    return replies


def _step(engine: LLMEngine) -> Iterator[Any]:
    outputs = engine.step()
    if not outputs:
        time.sleep(0.001)  # as the engine's own process does in a step without a model
    return (output for output in outputs if output.finished)


def _produced(engine: LLMEngine) -> int:
    """The tokens that each living request has at least."""
    requests = engine.engine_core.engine_core.scheduler.requests.values()
    return min((request.num_output_tokens for request in requests), default=0)


def _add(engine: LLMEngine, name: str, ask: Ask) -> None:
    sampling = {"temperature": 0, "max_tokens": 8} | ask.get("sampling", {})
    if (regex := sampling.pop("regex", None)) is not None:
        sampling["structured_outputs"] = StructuredOutputsParams(regex=regex)
    params = SamplingParams(
        detokenize=False, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY, **sampling
    )
    prompt: Any
    if "embeds" in ask:
        seed, length = ask["embeds"]
        width = engine.model_config.get_hidden_size()
        values = torch.randn(length, width, generator=torch.Generator().manual_seed(seed))
        prompt = {"prompt_embeds": values.to(engine.model_config.dtype)}
        if "mask" in ask:
            prompt |= {"prompt_token_ids": ask["prompt"], "prompt_is_token_ids": ask["mask"]}
    else:
        prompt = {"prompt_token_ids": ask["prompt"]}
    if "salt" in ask:
        prompt["cache_salt"] = ask["salt"]
    lora = LoRARequest(*ask["adapter"]) if "adapter" in ask else None
    engine.add_request(name, prompt, params, lora_request=lora, priority=ask.get("priority", 0))


def _reply(output: Any) -> Reply:
    return {
        "choices": [list(choice.token_ids) for choice in output.outputs],
        "cached": output.num_cached_tokens,
        "logprobs": [
            next(iter(position.values())).logprob
            for position in output.prompt_logprobs or ()
            if position is not None
        ],
    }
