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
    """A model of a family. config: its `config.json`, over what all have in common.

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
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": WINDOW_TOKENS,
        "query_pre_attn_scalar": 32,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
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
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": WINDOW_TOKENS,
        "global_head_dim": 64,
        "num_hidden_layers": 6,
        "layer_types": [_WINDOW] * 5 + [_FULL],
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": VOCABULARY,
        "num_kv_shared_layers": 0,
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
        "hidden_act": "silu",
        "sliding_window": WINDOW_TOKENS,
        "layer_types": [_WINDOW] * 3 + [_FULL],
        "layer_norm_eps": 1e-5,
        "logit_scale": 1.0,
        "rope_theta": 50_000.0,
        "attention_bias": False,
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
        "hidden_act": "silu",
        "sliding_window": WINDOW_TOKENS,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": [_WINDOW, _FULL] * 2,
        "rope_theta": 150_000.0,
        "attention_bias": True,
        "swiglu_limit": 7.0,
    },
)
"""A group with a window and one with full attention, of two layers each, with sinks."""

LLAMA4 = Family(
    "llama4",
    {
        "architectures": ["Llama4ForCausalLM"],
        "model_type": "llama4_text",
        "hidden_act": "silu",
        "rope_theta": 500_000.0,
        "intermediate_size_mlp": 512,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
        "use_qk_norm": True,
        "attention_chunk_size": 512,
        "no_rope_layers": [1, 1, 1, 0],
        "attn_temperature_tuning": False,
        "layer_types": ["chunked_attention"] * 3 + [_FULL],
        "attention_bias": False,
        "router_jitter_noise": 0.0,
    },
)
"""Three groups with local attention, which begins anew after 512 tokens, and one without."""

MISTRAL = Family(
    "mistral",
    {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "hidden_act": "silu",
        "sliding_window": WINDOW_TOKENS,
        "rope_theta": 10_000.0,
    },
)
"""A window in every layer: one group, and none with full attention."""

LFM2 = Family(
    "lfm2",
    {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "norm_eps": 1e-5,
        "layer_types": ["conv"] * 3 + [_FULL],
        "conv_L_cache": 3,
        "conv_bias": False,
        "block_multiple_of": 64,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "block_ff_dim": 512,
        "rope_theta": 1_000_000.0,
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
        "hidden_act": "silu",
        "rope_theta": 10_000_000.0,
        "partial_rotary_factor": 0.25,
        **_GATED_DELTANET,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
        "attention_bias": False,
        "full_attention_interval": 4,
    },
)
"""Three groups with the states of a Gated DeltaNet and one with full attention."""

QWEN3_5 = Family(
    "qwen3_5",
    {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "hidden_act": "silu",
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000_000.0,
            "partial_rotary_factor": 0.25,
        },
        **_GATED_DELTANET,
        "attention_bias": False,
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
        "conv_kernel": 4,
        "expand": 2,
        "hidden_act": "silu",
        "chunk_size": 64,
        "use_conv_bias": True,
        "use_bias": False,
        "layer_norm_epsilon": 1e-5,
        "time_step_limit": [0.0, 1_000_000_000.0],
    },
)
"""One group with the states of all four layers, and none with attention."""

GRANITE4 = Family(
    "granite4",
    {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "hidden_act": "silu",
        "layer_types": ["mamba"] * 3 + ["attention"],
        "mamba_n_heads": 8,
        "mamba_d_head": 64,
        "mamba_n_groups": 1,
        "mamba_d_state": 32,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_chunk_size": 64,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": 512,
        "position_embedding_type": "nope",
        "attention_bias": False,
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
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
        "conv_kernel": 4,
        "expand": 2,
        "chunk_size": 64,
        "mlp_hidden_act": "relu2",
        "mamba_hidden_act": "silu",
        "use_conv_bias": True,
        "use_bias": False,
        "mlp_bias": False,
        "attention_bias": False,
        "mamba_proj_bias": False,
        "layer_norm_epsilon": 1e-5,
        "norm_eps": 1e-5,
        "time_step_limit": [0.0, 1_000_000_000.0],
        "residual_in_fp32": False,
    },
)
"""Mamba2 and full attention among layers without either."""

FALCON_H1 = Family(
    "falcon_h1",
    {
        "architectures": ["FalconH1ForCausalLM"],
        "model_type": "falcon_h1",
        "hidden_act": "silu",
        "num_hidden_layers": 3,
        "mamba_d_ssm": 512,
        "mamba_n_heads": 8,
        "mamba_d_head": 64,
        "mamba_n_groups": 1,
        "mamba_d_state": 32,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_chunk_size": 64,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "mamba_norm_before_gate": True,
        "mamba_rms_norm": True,  # without it, states of random weights hardly change a token
        "mamba_use_mlp": True,
        "rope_theta": 1_000_000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "projectors_bias": False,
        "attention_in_multiplier": 1.0,
        "attention_out_multiplier": 1.0,
        "embedding_multiplier": 1.0,
        "key_multiplier": 1.0,
        "lm_head_multiplier": 1.0,
        "mlp_multipliers": [1.0, 1.0],
        "ssm_in_multiplier": 1.0,
        "ssm_out_multiplier": 1.0,
        "ssm_multipliers": [1.0] * 5,
    },
)
"""Mamba2 and full attention side by side in every layer."""


DEEPSEEK_V3 = Family(
    "deepseek_v3",
    {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_key_value_heads": 8,
        "q_lora_rank": 64,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "moe_layer_freq": 1,
        "first_k_dense_replace": 3,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "rope_theta": 10_000.0,
        "hidden_act": "silu",
    },
)
"""Multi-head latent attention (MLA), and experts in the last layer. Every tensor rank has the whole
of the KV: one latent head of 576 numbers per token and layer."""


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
