"""Tiny models of other families than Llama, with random weights, from their `config.json` alone.

The weights are normal like those of `lab.models`, and for the same reason: a wrong page of KV has
to change the tokens. Transformers makes the modules, so the names are those of a real checkpoint.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lab.models import MAX_TOKENS, VOCABULARY

_COMMON = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": MAX_TOKENS,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
}
WINDOW_TOKENS = 64
STATE_MEMORY = -4.0
"""Bias of a state's time step: a state forgets a fiftieth with every token, so that an answer
depends on one that is a hundred tokens old."""
_WINDOW, _FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True, slots=True)
class Family:
    """A model of a family. config: its `config.json`, over what all have in common, as far as it
    differs from the defaults of transformers.

    norm: the value of the weights of norms; Gemma adds 1 to them.
    """

    name: str
    config: dict[str, Any]
    weight_std: float = 0.08
    embedding_std: float = 1.0
    norm: float = 1.0


GEMMA3 = Family(
    "gemma3",
    {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "sliding_window": WINDOW_TOKENS,
        "query_pre_attn_scalar": 32,
        "num_hidden_layers": 6,
        "layer_types": [_WINDOW] * 5 + [_FULL],
    },
    norm=0.0,
)
"""Five groups with a window and one with full attention, of one layer each."""

GEMMA4 = Family(
    "gemma4",
    {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "sliding_window": WINDOW_TOKENS,
        "global_head_dim": 64,
        "num_hidden_layers": 6,
        "layer_types": [_WINDOW] * 5 + [_FULL],
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": VOCABULARY,
    },
)
"""Five groups with a window, in blocks of 256 tokens, and one with full attention, in blocks of
128."""

GEMMA4_SHARED = Family(
    "gemma4_shared",
    GEMMA4.config
    | {"layer_types": [_WINDOW] * 3 + [_FULL, _WINDOW, _FULL], "num_kv_shared_layers": 2},
)
"""As the smallest of Gemma 4, whose last layers have no KV of their own: the fifth layer reads the
third's, and the sixth the fourth's."""

COHERE2 = Family(
    "cohere2",
    {
        "architectures": ["Cohere2ForCausalLM"],
        "model_type": "cohere2",
        "sliding_window": WINDOW_TOKENS,
        "layer_types": [_WINDOW] * 3 + [_FULL],
        "logit_scale": 1.0,
        "rope_theta": 50_000.0,
        "tie_word_embeddings": True,
    },
    embedding_std=0.05,  # its embeddings are its head, as LFM2's
)
"""Three layers with a window and rotated keys, and one with full attention and no positions."""

GPT_OSS = Family(
    "gpt_oss",
    {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "sliding_window": WINDOW_TOKENS,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": [_WINDOW, _FULL] * 2,
    },
)
"""A group with a window and one with full attention, of two layers each, with sinks."""

LLAMA4 = Family(
    "llama4",
    {
        "architectures": ["Llama4ForCausalLM"],
        "model_type": "llama4_text",
        "intermediate_size_mlp": 512,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 512,
        "no_rope_layers": [1, 1, 1, 0],
        "attn_temperature_tuning": False,
        "layer_types": ["chunked_attention"] * 3 + [_FULL],
    },
)
"""Three groups with local attention, which begins anew after 512 tokens, and one without."""

MISTRAL = Family(
    "mistral",
    {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": WINDOW_TOKENS,
    },
)
"""A window in every layer: one group, and none with full attention."""

LFM2 = Family(
    "lfm2",
    {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "layer_types": ["conv"] * 3 + [_FULL],
        "conv_L_cache": 3,
        "block_multiple_of": 64,
        "block_auto_adjust_ff_dim": False,
        "conv_dim": 256,
        "block_dim": 256,
        "conv_dim_out": 256,
        "block_norm_eps": 1e-5,
    },
    embedding_std=0.05,  # its embeddings are its head: large ones repeat the last token
)
"""Three groups with the states of a short convolution and one with full attention."""

_GATED_DELTANET = {
    "layer_types": ["linear_attention"] * 3 + [_FULL],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
}

QWEN3_NEXT = Family(
    "qwen3_next",
    {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "rope_theta": 10_000_000.0,
        **_GATED_DELTANET,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "full_attention_interval": 4,
    },
)
"""Three groups with the states of a Gated DeltaNet and one with full attention."""

QWEN3_5 = Family(
    "qwen3_5",
    {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000_000.0,
            "partial_rotary_factor": 0.25,
        },
        **_GATED_DELTANET,
    },
)
"""The same kinds of layers in the next generation, dense and without pictures."""

MAMBA2 = Family(
    "mamba2",
    {
        "architectures": ["Mamba2ForCausalLM"],
        "model_type": "mamba2",
        "num_heads": 8,
        "head_dim": 64,
        "state_size": 32,
        "n_groups": 1,
        "chunk_size": 64,
        "time_step_limit": [0.0, 1_000_000_000.0],
    },
)
"""One group with the states of all four layers, and none with attention."""

GRANITE4 = Family(
    "granite4",
    {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "layer_types": ["mamba"] * 3 + ["attention"],
        "mamba_n_heads": 8,
        "mamba_d_head": 64,
        "mamba_d_state": 32,
        "mamba_chunk_size": 64,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": 512,
        "position_embedding_type": "nope",
        "attention_multiplier": 0.17,
    },
)
"""Three groups with the states of Mamba2 and one with full attention."""

NEMOTRON_H = Family(
    "nemotron_h",
    {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "hybrid_override_pattern": "M-M*M-",
        "num_hidden_layers": 6,
        "mamba_num_heads": 8,
        "mamba_head_dim": 64,
        "n_groups": 1,
        "ssm_state_size": 32,
        "chunk_size": 64,
        "norm_eps": 1e-5,
        "time_step_limit": [0.0, 1_000_000_000.0],
    },
)
"""Mamba2 and full attention among layers without either."""

FALCON_H1 = Family(
    "falcon_h1",
    {
        "architectures": ["FalconH1ForCausalLM"],
        "model_type": "falcon_h1",
        "num_hidden_layers": 3,
        "mamba_d_ssm": 512,
        "mamba_n_heads": 8,
        "mamba_d_head": 64,
        "mamba_d_state": 32,
        "mamba_chunk_size": 64,
        "mamba_rms_norm": True,  # without it, states of random weights hardly change a token
        "mamba_use_mlp": True,
        "rope_theta": 1_000_000.0,
    },
)
"""Mamba2 and full attention side by side in every layer."""


def build(directory: Path, family: Family, *, seed: int = 0) -> Path:
    """Write the model into `directory`/<family>-<seed> unless it is there; return that path."""
    path = directory / f"{family.name}-{seed}"
    if (path / "done").exists():
        return path
    from transformers import AutoConfig, AutoModelForCausalLM

    path.mkdir(parents=True, exist_ok=True)
    text = json.dumps(_COMMON | family.config, indent=2)
    (path / "config.json").write_text(text)
    with torch.device("cpu"):
        model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            AutoConfig.from_pretrained(path)
        )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if weights.dim() < 2 and "norm" in name:
                weights.fill_(family.norm)
            elif name.endswith("dt_bias"):
                weights.fill_(STATE_MEMORY)
            else:
                std = family.embedding_std if "embed_tokens" in name else family.weight_std
                weights.copy_(torch.randn(weights.shape, generator=generator) * std)
    model.to(torch.bfloat16).save_pretrained(path)
    (path / "config.json").write_text(text)
    (path / "done").touch()
    return path
