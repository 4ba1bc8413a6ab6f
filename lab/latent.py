"""A small DeepSeek-V3 with random weights: multi-head latent attention (MLA), and experts.

Every tensor-parallel rank keeps the whole of its KV: one latent head of 576 numbers per token and
layer. As in `lab.models`, the weights are large enough that a wrong page changes the tokens.
"""

from __future__ import annotations

from pathlib import Path

import torch

from lab import models
from lab.models import TINY, VOCABULARY

HIDDEN, LAYERS, HEADS, EXPERTS = TINY.hidden, TINY.layers, TINY.heads, 4
LATENT, ROTATED, PLAIN, VALUE, QUERY = 512, 64, 128, 128, 64
WIDE, NARROW = TINY.intermediate, 64
"""Intermediate sizes of a dense layer and of an expert."""
_CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_key_value_heads": HEADS,
    "head_dim": ROTATED,
    "q_lora_rank": QUERY,
    "kv_lora_rank": LATENT,
    "qk_nope_head_dim": PLAIN,
    "qk_rope_head_dim": ROTATED,
    "v_head_dim": VALUE,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": NARROW,
    "moe_layer_freq": 1,
    "first_k_dense_replace": LAYERS - 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "routed_scaling_factor": 1.0,
}


def build(directory: Path, *, seed: int = 0) -> Path:
    """Write the model into `directory`/latent-<seed> unless it is there; return that path."""
    config = models.config_of(TINY) | _CONFIG
    return models.write(directory / f"latent-{seed}", config, lambda: _weights(seed))


def _weights(seed: int) -> dict[str, torch.Tensor]:
    normal = models.normal(seed, TINY.weight_std)

    def ones(size: int) -> torch.Tensor:
        return torch.ones(size, dtype=torch.bfloat16)

    def perceptron(prefix: str, wide: int) -> dict[str, torch.Tensor]:
        return {
            f"{prefix}.gate_proj.weight": normal(wide, HIDDEN),
            f"{prefix}.up_proj.weight": normal(wide, HIDDEN),
            f"{prefix}.down_proj.weight": normal(HIDDEN, wide),
        }

    weights = {
        "model.embed_tokens.weight": normal(VOCABULARY, HIDDEN, std=1.0),
        "model.norm.weight": ones(HIDDEN),
        "lm_head.weight": normal(VOCABULARY, HIDDEN),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        attention, feed = f"{prefix}.self_attn", f"{prefix}.mlp"
        weights |= {
            f"{prefix}.input_layernorm.weight": ones(HIDDEN),
            f"{prefix}.post_attention_layernorm.weight": ones(HIDDEN),
            f"{attention}.q_a_proj.weight": normal(QUERY, HIDDEN),
            f"{attention}.q_a_layernorm.weight": ones(QUERY),
            f"{attention}.q_b_proj.weight": normal(HEADS * (PLAIN + ROTATED), QUERY),
            f"{attention}.kv_a_proj_with_mqa.weight": normal(LATENT + ROTATED, HIDDEN),
            f"{attention}.kv_a_layernorm.weight": ones(LATENT),
            f"{attention}.kv_b_proj.weight": normal(HEADS * (PLAIN + VALUE), LATENT),
            f"{attention}.o_proj.weight": normal(HIDDEN, HEADS * VALUE),
        }
        if layer < LAYERS - 1:
            weights |= perceptron(feed, WIDE)
            continue
        weights[f"{feed}.gate.weight"] = normal(EXPERTS, HIDDEN)
        weights[f"{feed}.gate.e_score_correction_bias"] = torch.zeros(EXPERTS)
        weights |= perceptron(f"{feed}.shared_experts", NARROW)
        for expert in range(EXPERTS):
            weights |= perceptron(f"{feed}.experts.{expert}", NARROW)
    return weights
