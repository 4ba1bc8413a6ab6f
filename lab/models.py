"""Small Llama models with random weights: a config.json and a safetensors file, nothing else.

They exist to make a KV cache matter. vLLM's own dummy weights are drawn from ±1e-3; with those,
greedy tokens hardly depend on the attention and a broken cache goes unnoticed. Here the weights
are normal with a standard deviation of about 0.08 and the embeddings are large, so that a wrong
page of KV changes the tokens.

The two standard deviations of a preset were chosen by trying: a zeroed KV cache changes the tokens
of every prompt, while the last-bit differences between a whole prefill and one that starts from a
prefix hit (other matrix shapes, bf16) rarely do. Rarely is not never: compare with a run that had
a hit of the same length, or use dtype="float32", where they never did.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save, save_file

VOCABULARY = 1_024
MAX_TOKENS = 4_096


@dataclass(frozen=True, slots=True)
class Preset:
    """The shape of a model. KV is bf16: `kv_bytes_per_token` is what one token costs a cache."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    weight_std: float
    embedding_std: float
    window_tokens: int | None = None
    """Where given, every layer but the last looks at so many tokens only."""
    max_tokens: int = MAX_TOKENS

    @property
    def kv_bytes_per_token(self) -> int:
        # keys and values, two bytes each
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim


TINY = Preset(
    "tiny",
    hidden=256,
    layers=4,
    heads=8,
    kv_heads=4,
    head_dim=32,
    intermediate=512,
    weight_std=0.08,
    embedding_std=1.0,
)
"""2 KiB of KV per token: for tests of behaviour."""

WINDOWED = replace(TINY, name="windowed", window_tokens=64)
"""A hybrid: the first three layers look at the last 64 tokens, the fourth at all."""

FAT = replace(
    TINY,
    name="fat",
    layers=16,
    kv_heads=8,
    head_dim=128,
    intermediate=1_024,
    weight_std=0.06,
    embedding_std=2.0,
)
"""64 KiB of KV per token, half of Llama-3-8B's, at little compute: for tests of data transfer."""

FATTER = replace(FAT, name="fatter", layers=32, max_tokens=8_192)
"""128 KiB of KV per token, as Llama-3-8B has."""

LONG = Preset(
    "long",
    hidden=64,
    layers=2,
    heads=2,
    kv_heads=1,
    head_dim=32,
    intermediate=64,
    weight_std=0.2,
    embedding_std=1.0,
    max_tokens=33_000,
)
"""256 bytes of KV per token: for prompts of 32,000 tokens that are computed in seconds."""


def prompts(count: int, tokens: int, *, seed: int = 0) -> list[list[int]]:
    """`count` random prompts that share no prefix (but by chance: the vocabulary is small)."""
    draw = random.Random(seed)
    return [[draw.randrange(2, VOCABULARY) for _ in range(tokens)] for _ in range(count)]


def build(directory: Path, preset: Preset, *, seed: int = 0) -> Path:
    """Write the model into `directory`/<preset>-<seed> unless it is there; return that path.

    The same preset and seed give the same bytes with the same torch version. The weights file is
    written last and renamed into place, so a directory that has it is complete.
    """
    path = directory / f"{preset.name}-{seed}"
    return write(path, config_of(preset), lambda: _weights(preset, seed))


def write(
    path: Path, config: Mapping[str, object], weights: Callable[[], dict[str, torch.Tensor]]
) -> Path:
    """Write a model into `path` unless it is there; return `path`."""
    file = path / "model.safetensors"
    if not file.exists():
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(config, indent=2))
        partial = path / "model.safetensors.partial"
        save_file(weights(), partial, metadata={"format": "pt"})
        partial.rename(file)
    return path


def add_tokenizer(model: Path) -> Path:
    """Give the model a tokenizer of the words and digits that `s3kv prove` makes prompts of."""
    from tokenizers import Regex, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast

    from s3kv.prove.prompts import make_prompts

    pattern, words = r"\d|\w+|\W", {"<s>": 0, "</s>": 1, "<unk>": 2}

    def encode(text: str) -> list[int]:
        return [words.setdefault(word, len(words)) for word in re.findall(pattern, text)]

    make_prompts(encode, MAX_TOKENS, 64, seed=0)
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split(Regex(pattern), "isolated")
    fast: Any = PreTrainedTokenizerFast
    fast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(model)
    return model


def normal(seed: int, std: float) -> Callable[..., torch.Tensor]:
    """A function that draws tensors of a shape; `std` is its default for the keyword `std`."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, std: float = std) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * std).to(torch.bfloat16)

    return draw


def build_adapter(path: Path, preset: Preset, *, seed: int = 0, alpha: int = 16) -> Path:
    """Write a LoRA adapter of rank 4 for the preset's queries and values into `path`; return it.

    Written in place over what is there: the same files, of the same lengths.
    """
    draw = normal(seed, 0.1)
    rank, weights = 4, {}
    for layer in range(preset.layers):
        for module, heads in (("q_proj", preset.heads), ("v_proj", preset.kv_heads)):
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            weights[f"{name}.lora_A.weight"] = draw(rank, preset.hidden)
            weights[f"{name}.lora_B.weight"] = draw(heads * preset.head_dim, rank)
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": "",
        "target_modules": ["q_proj", "v_proj"],
        "r": rank,
        "lora_alpha": alpha,
        "bias": "none",
        "modules_to_save": None,
    }
    path.mkdir(parents=True, exist_ok=True)
    for file, data in (
        ("adapter_config.json", json.dumps(config).encode()),
        ("adapter_model.safetensors", save(weights, metadata={"format": "pt"})),
    ):
        with open(path / file, "r+b" if (path / file).exists() else "wb") as handle:
            handle.write(data)
            handle.truncate()
    return path


def config_of(preset: Preset) -> dict[str, object]:
    config: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "hidden_size": preset.hidden,
        "intermediate_size": preset.intermediate,
        "num_hidden_layers": preset.layers,
        "num_attention_heads": preset.heads,
        "num_key_value_heads": preset.kv_heads,
        "head_dim": preset.head_dim,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": preset.max_tokens,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    if preset.window_tokens is not None:
        kinds = ["sliding_attention"] * (preset.layers - 1) + ["full_attention"]
        config |= {"sliding_window": preset.window_tokens, "layer_types": kinds}
    return config


def _weights(preset: Preset, seed: int) -> dict[str, torch.Tensor]:
    draw = normal(seed, preset.weight_std)

    def ones() -> torch.Tensor:
        return torch.ones(preset.hidden, dtype=torch.bfloat16)

    hidden, wide = preset.hidden, preset.intermediate
    queries, keys = preset.heads * preset.head_dim, preset.kv_heads * preset.head_dim
    weights = {
        "model.embed_tokens.weight": draw(VOCABULARY, hidden, std=preset.embedding_std),
        "model.norm.weight": ones(),
        "lm_head.weight": draw(VOCABULARY, hidden),
    }
    for layer in range(preset.layers):
        prefix = f"model.layers.{layer}"
        weights |= {
            f"{prefix}.self_attn.q_proj.weight": draw(queries, hidden),
            f"{prefix}.self_attn.k_proj.weight": draw(keys, hidden),
            f"{prefix}.self_attn.v_proj.weight": draw(keys, hidden),
            f"{prefix}.self_attn.o_proj.weight": draw(hidden, queries),
            f"{prefix}.mlp.gate_proj.weight": draw(wide, hidden),
            f"{prefix}.mlp.up_proj.weight": draw(wide, hidden),
            f"{prefix}.mlp.down_proj.weight": draw(hidden, wide),
            f"{prefix}.input_layernorm.weight": ones(),
            f"{prefix}.post_attention_layernorm.weight": ones(),
        }
    return weights
