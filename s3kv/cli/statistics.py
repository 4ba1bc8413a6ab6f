"""What numbers a tensor holds: for somebody who wonders whether a cache is full of zeros."""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass
from typing import Any

from s3kv.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TensorStatistics:
    """least, most and mean of the numbers that are finite, None when there is none. nans,
    infinite: how many are not."""

    name: str
    least: float | None
    most: float | None
    mean: float | None
    nans: int
    infinite: int


def statistics(data: bytes) -> list[TensorStatistics]:
    """Of every tensor of a safetensors file, in the order of its names.

    Imports torch, which takes seconds and knows every dtype there is. Raises `ConfigError` where it
    cannot be imported.
    """
    try:
        load = importlib.import_module("safetensors.torch").load
    except ImportError as error:
        raise ConfigError(f"--stats needs torch, which cannot be imported: {error}") from error
    return [_of(name, tensor) for name, tensor in sorted(load(data).items())]


def _of(name: str, tensor: Any) -> TensorStatistics:
    numbers = tensor.double().flatten()
    finite = numbers[numbers.isfinite()]
    nans = int(numbers.isnan().sum())
    infinite = int(numbers.isinf().sum())
    if not finite.numel():
        return TensorStatistics(name, None, None, None, nans, infinite)
    mean = float(finite.mean())
    return TensorStatistics(
        name,
        float(finite.min()),
        float(finite.max()),
        mean if math.isfinite(mean) else None,
        nans,
        infinite,
    )
