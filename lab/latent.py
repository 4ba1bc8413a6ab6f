"""A small DeepSeek-V3 with random weights: multi-head latent attention (MLA), and experts.

Every tensor-parallel rank keeps the whole of its KV: one latent head of 576 numbers per token and
layer. As in `lab.models`, the weights are large enough that a wrong page changes the tokens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from lab.models import MAX_TOKENS, VOCABULARY

HIDDEN, LAYERS, HEADS, EXPERTS = 256, 4, 8, 4
LATENT, ROTATED, PLAIN, VALUE, QUERY = 512, 64, 128, 128, 64
WIDE, NARROW = 512, 64
"""Intermediate sizes of a dense layer and of an expert."""


def build(directory: Path, *, seed: int = 0) -> Path:
    """Write the model into `directory`/latent-<seed> unless it is there; return that path."""
    path = directory / f"latent-{seed}"
    weights = path / "model.safetensors"
    if not weights.exists():
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(_CONFIG, indent=2))
        partial = path / "model.safetensors.partial"
        save_file(_weights(seed), partial, metadata={"format": "pt"})
        partial.rename(weights)
    return path


_CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "torch_dtype": "bfloat16",
    "vocab_size": VOCABULARY,
    "max_position_embeddings": MAX_TOKENS,
    "hidden_size": HIDDEN,
    "intermediate_size": WIDE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "q_lora_rank": QUERY,
    "kv_lora_rank": LATENT,
    "qk_nope_head_dim": PLAIN,
    "qk_rope_head_dim": ROTATED,
    "v_head_dim": VALUE,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": NARROW,
    "moe_layer_freq": 1,
    "first_k_dense_replace": LAYERS - 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def _weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float = 0.08) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * std).to(torch.bfloat16)

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


def keep_prefix_cache() -> None:
    """Let the CPU platform keep the engine's prefix cache beside MLA, for a reference with a hit.

    Beside its backend CPU_MLA vLLM switches it off, although its kernels read such a prefix. To be
    called before the engine is configured.
    """
    from vllm.platforms.cpu import CpuPlatform

    decide = CpuPlatform.check_and_update_config

    def decided(vllm_config: Any) -> None:
        decide(vllm_config)
        vllm_config.cache_config.enable_prefix_caching = True

    CpuPlatform.check_and_update_config = staticmethod(decided)
