"""Identity of a request's media: a digest of the encoder's input, not the name.

vLLM names an image by a hash of its content or by the name that a client gave it, and nothing
distinguishes the two. So a name cannot be a key in a bucket. A digest of the processed tensors can,
and the engine core has those of every item. See docs/decisions/0011-media-names.md.
"""

from __future__ import annotations

import weakref
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import torch
from blake3 import blake3

from s3kv.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem

_NAMES = 1_000_000
"""Capacity of `MediaNames`; a name takes about 250 bytes. No name is forgotten, because the
engine's own entry under a name may be as old as the engine."""


def check_media_names(vllm_config: VllmConfig, *, trusted: bool) -> None:
    """Raise `ConfigError` if the setting trusts names while vLLM numbers unnamed media."""
    multimodal, cache = vllm_config.model_config.multimodal_config, vllm_config.cache_config
    if not trusted or not multimodal or cache.enable_prefix_caching:
        return
    if multimodal.mm_processor_cache_gb <= 0:
        raise ConfigError(
            "trust_media_names is True, and vLLM numbers unnamed media if both its "
            "prefix cache and its processor cache are off: one number would be a different image "
            "in every process. Turn one of them on (--enable-prefix-caching, or "
            "--mm-processor-cache-gb above 0), or set trust_media_names to False"
        )


class MediaDigests:
    """Digests of processed media. Used from one thread, the engine's.
    An item's tensors are read once for as long as vLLM keeps them. That takes 0.2 ms for an image
    of 1.3 MB and 5 ms for a video of 20 MB."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Any], bytes | None]] = {}

    def of(self, feature: MultiModalFeatureSpec) -> bytes | None:
        """The digest of the encoder's whole input. None if this process does not have all of it:
        the item is on a device, is in shared memory that only workers read, or has only what the
        prompt's layout needs."""
        item = feature.data
        if item is None:
            return None
        known = self._known.get(id(item))
        if known is None or known[0]() is not item:
            number = id(item)
            gone = weakref.ref(item, lambda _: self._known.pop(number, None))
            known = self._known[number] = (gone, _digest(item))
        digest = known[1]
        return digest if digest and _count(item) >= feature.mm_position.get_num_embeds() else None


def _digest(item: MultiModalKwargsItem) -> bytes | None:
    hasher = blake3(b"s3kv media 1")
    try:
        for name in sorted(item):
            _update(hasher, name)
            _update(hasher, item[name].data)
    except TypeError:
        return None
    return bytes(hasher.digest())


def _update(hasher: Any, value: Any) -> None:
    """Add a value to the hash, after its kind and size, so that different inputs never add the same
    bytes. Raises `TypeError` for a value that is not content."""
    if isinstance(value, torch.Tensor):
        if not value.is_cpu:
            raise TypeError("the tensor is on a device, and reading it would wait for the device")
        tensor = value.detach().contiguous()
        hasher.update(f"tensor {tensor.dtype} {tuple(tensor.shape)};".encode())
        hasher.update(tensor.reshape(-1).view(torch.uint8).numpy())
    elif isinstance(value, (list, tuple)):
        hasher.update(f"list {len(value)};".encode())
        for one in value:
            _update(hasher, one)
    elif isinstance(value, (str, int, float, bool)):
        text = repr(value).encode()
        hasher.update(f"{type(value).__name__} {len(text)};".encode() + text)
    else:
        raise TypeError(type(value).__name__)


def _count(item: MultiModalKwargsItem) -> int:
    """Count of the numbers in the item's tensors. An encoder makes at most as many embeddings as it
    gets numbers. An item of addresses in shared memory, or of image sizes, has fewer numbers."""

    def count(value: Any) -> int:
        if isinstance(value, (list, tuple)):
            return sum(map(count, value))
        return value.numel() if isinstance(value, torch.Tensor) else 0

    return sum(count(element.data) for element in item.values())


class MediaNames:
    """Record of the content behind each name in this engine, whose own caches use names as keys.
    Used from one thread.
    A name that has stood for two contents is disputed for good: it is unknown with which of them
    the engine computes."""

    def __init__(self, capacity: int = _NAMES) -> None:
        self._capacity = capacity
        self._meanings: dict[bytes, bytes | None] = {}

    def has(self, name: str) -> bool:
        """Whether the name is recorded, as all are until the record is full."""
        return _short(name) in self._meanings

    def disputed(self, name: str, content: bytes | None) -> bool:
        """Whether `name` may have stood for anything but `content`. Unknown content (None) also
        disputes the name. A new name is disputed if the record is full."""
        key = _short(name)
        if key not in self._meanings:
            if len(self._meanings) >= self._capacity:
                return True
            self._meanings[key] = content
        if content is None or self._meanings[key] != content:
            self._meanings[key] = None
            return True
        return False


def _short(name: str) -> bytes:
    return blake2b(name.encode(), digest_size=16).digest()


def placed(feature: MultiModalFeatureSpec, content: bytes) -> bytes:
    """The digest of `content` with its places in the prompt, which a client may also choose."""
    position = feature.mm_position
    mask = b"" if position.is_embed is None else position.is_embed.cpu().numpy().tobytes()
    place = f"{feature.modality}\0{position.length}\0".encode()
    return blake2b(place + mask, key=content, digest_size=32).digest()
