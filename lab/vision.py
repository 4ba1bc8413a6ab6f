"""A small BLIP-2 with random weights, and images for it: what an encoder cache is tried on.

One image costs `QUERY_TOKENS` embeddings of `HIDDEN` bf16 values. Written with transformers, which
vLLM brings along; no hub and no torchvision is needed. The weights are as large as those of
`lab.models`, and the projection that ends the encoder larger, so that the image decides about the
tokens: a zeroed encoder output changes them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

QUERY_TOKENS = 32
HIDDEN = 128
IMAGE_PIXELS = 56
_VOCABULARY = 512
_WEIGHT_STD = 0.15
_EMBEDDING_STD = 1.0


def build(
    directory: Path,
    *,
    seed: int = 0,
    encoder_layers: int = 2,
    query_tokens: int = QUERY_TOKENS,
    hidden: int = HIDDEN,
) -> Path:
    """Write the model into a folder of `directory` unless it is there; return its path.

    encoder_layers: of the vision tower; many make an encoder that is worth a wait.
    query_tokens, hidden: rows and width of an item.
    """
    path = directory / f"blip2-{encoder_layers}-{query_tokens}x{hidden}-{seed}"
    if (path / "complete").exists():
        return path
    from transformers import Blip2Config, Blip2ForConditionalGeneration

    path.mkdir(parents=True, exist_ok=True)
    config = Blip2Config(**_config(encoder_layers, query_tokens, hidden))
    model: Any = Blip2ForConditionalGeneration(config)
    _draw(model, seed)
    model.to(torch.bfloat16).save_pretrained(path)
    _save_processor(path, query_tokens)
    (path / "complete").touch()
    return path


def allow_albums() -> None:
    """In the engine's process, before it starts: more than one image a prompt, one after the other
    at its beginning. vLLM allows a BLIP-2 one, which is all it was trained for; the rest of vLLM
    does not know the difference."""
    from vllm.model_executor.models.blip2 import Blip2ProcessingInfo

    Blip2ProcessingInfo.get_supported_mm_limits = lambda self: {"image": None}


def _config(encoder_layers: int, query_tokens: int, hidden: int) -> dict[str, Any]:
    return {
        "vision_config": {
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": encoder_layers,
            "num_attention_heads": 4,
            "image_size": IMAGE_PIXELS,
            "patch_size": 14,
        },
        "qformer_config": {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "encoder_hidden_size": 128,
            "vocab_size": _VOCABULARY,
        },
        "text_config": {
            "model_type": "opt",
            "hidden_size": hidden,
            "ffn_dim": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 1024,
            "vocab_size": _VOCABULARY,
            "word_embed_proj_dim": hidden,
            "tie_word_embeddings": False,
            "bos_token_id": 2,
            "eos_token_id": 2,
            "pad_token_id": 1,
        },
        "num_query_tokens": query_tokens,
        "image_token_index": 4,
        "tie_word_embeddings": False,
    }


def _draw(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "norm" in name:  # ones and zeros, as they are
            continue
        large = "embed" in name or "query_tokens" in name or "language_projection" in name
        std = _EMBEDDING_STD if large else _WEIGHT_STD
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)


def _save_processor(path: Path, query_tokens: int) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    special = ["<unk>", "<pad>", "</s>", "<s>", "<image>"]
    words = special + [f"w{i}" for i in range(_VOCABULARY - len(special))]
    tokenizer = Tokenizer(WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(path / "tokenizer.json"))
    names = {"unk_token": "<unk>", "pad_token": "<pad>", "bos_token": "</s>", "eos_token": "</s>"}
    _write(path / "tokenizer_config.json", names | {"tokenizer_class": "PreTrainedTokenizerFast"})
    size = {"height": IMAGE_PIXELS, "width": IMAGE_PIXELS}
    image = {"image_processor_type": "BlipImageProcessor", "size": size, "resample": 3}
    _write(path / "preprocessor_config.json", image | {"processor_class": "Blip2Processor"})
    _write(
        path / "processor_config.json",
        {"processor_class": "Blip2Processor", "num_query_tokens": query_tokens},
    )


def _write(path: Path, tree: dict[str, Any]) -> None:
    path.write_text(json.dumps(tree, indent=2))


def image(seed: int) -> Any:
    """A picture of coloured squares, as PIL has it; the same for the same seed."""
    from PIL import Image

    generator = torch.Generator().manual_seed(seed)
    squares = torch.randint(0, 256, (4, 4, 3), generator=generator, dtype=torch.uint8)
    side = IMAGE_PIXELS // 4
    pixels = squares.repeat_interleave(side, dim=0).repeat_interleave(side, dim=1)
    return Image.fromarray(pixels.numpy())
