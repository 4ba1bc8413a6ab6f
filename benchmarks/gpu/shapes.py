"""The KV caches of known models, as vLLM registers them on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from s3kv.device.layout import PageLayout

CHUNK_TOKENS = 256


@dataclass(frozen=True)
class Model:
    """heads: on one rank. content: elements of a head's token, keys and values."""

    name: str
    layers: int
    heads: int
    content: int

    @property
    def token_bytes(self) -> int:
        return self.layers * self.heads * self.content * torch.bfloat16.itemsize


LLAMA_8B = Model("Llama-3-8B", layers=32, heads=8, content=2 * 128)
MODELS = (
    LLAMA_8B,
    Model("Llama-3-70B, TP 8", layers=80, heads=1, content=2 * 128),
    Model("DeepSeek-V3 (MLA)", layers=61, heads=1, content=512 + 64),
)
TINY = Model("tiny", layers=3, heads=2, content=32)
"""To try the programs with."""


def make_caches(
    model: Model, block_tokens: int, num_blocks: int, device: torch.device
) -> dict[str, torch.Tensor]:
    """Views [B, H, N, C] of one buffer in the order LBNHC, full of noise."""
    shape = (model.layers, num_blocks, block_tokens, model.heads, model.content)
    buffer = torch.empty(shape, dtype=torch.bfloat16, device=device)
    fill_with_noise(buffer)
    return {f"layers.{i}": buffer[i].permute(0, 2, 1, 3) for i in range(model.layers)}


def make_layout(caches: dict[str, torch.Tensor], block_tokens: int) -> PageLayout:
    num_blocks = len(next(iter(caches.values())))
    return PageLayout.of(caches, num_blocks, tuple(caches), CHUNK_TOKENS // block_tokens)


def fill_with_noise(tensor: torch.Tensor) -> None:
    """Nothing that a bus, or memory, could carry faster than other bytes."""
    for piece in tensor.view(torch.uint8).view(-1).split(2**30):
        piece.random_(0, 256)
