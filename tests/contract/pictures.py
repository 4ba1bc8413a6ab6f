"""Media of a request, as the engine core has them: real vLLM objects with small tensors."""

from __future__ import annotations

from typing import Any

import torch
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)


def kwargs_item(**values: Any) -> MultiModalKwargsItem:
    field = MultiModalBatchedField()
    return MultiModalKwargsItem({k: MultiModalFieldElem(v, field) for k, v in values.items()})


def picture(
    name: str,
    *,
    value: float = 1.0,
    offset: int = 0,
    length: int = 100,
    modality: str = "image",
    mask: torch.Tensor | None = None,
) -> MultiModalFeatureSpec:
    """An image of one colour, called `name`."""
    item = kwargs_item(pixel_values=torch.full((3, 32, 32), value, dtype=torch.bfloat16))
    position = PlaceholderRange(offset=offset, length=length, is_embed=mask)
    return MultiModalFeatureSpec(item, modality, name, position, name)


def without_tensors(name: str) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(None, "image", name, PlaceholderRange(0, 100), name)
