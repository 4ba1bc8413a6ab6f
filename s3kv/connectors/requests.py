"""Under which hashes a request's chunks are kept, where vLLM's own do not say enough.

vLLM hashes an adapter (LoRA) by its name, from 0.32 on also by its path, but never by its content;
and an image that the client has named itself by that name. Within one engine that is the client's
promise to keep. A bucket is shared by engines and outlives them, so here:

- chunks computed with an adapter are kept under hashes derived with a digest of its files;
- a request gets no cache at all when its adapter's files are not at hand here or were changed
  after the adapter was loaded, and when it names its images itself.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, overload

from s3kv.connectors.weights import adapter_digest, adapter_stamp

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request

logger = logging.getLogger("s3kv")

_CONTENT_HASH = re.compile(r"(?:.*:)?(?:[0-9a-f]{64}|[0-9a-f]{128})", re.DOTALL)
"""What vLLM's hashers give (BLAKE3, SHA-256, SHA-512), behind the name of an adapter if any."""


class DerivedHashes(Sequence[bytes]):
    """`hashes`, which may grow, each derived with `key` at the moment it is read."""

    def __init__(self, hashes: Sequence[bytes], key: bytes) -> None:
        self._hashes = hashes
        self._key = key

    def __len__(self) -> int:
        return len(self._hashes)

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        if isinstance(index, slice):
            return [self._derive(block_hash) for block_hash in self._hashes[index]]
        return self._derive(self._hashes[index])

    def _derive(self, block_hash: bytes) -> bytes:
        return blake2b(block_hash, key=self._key, digest_size=32).digest()


class Adapters:
    """What tells adapters (LoRA) apart: digests of their files. Reads them the first time it meets
    an adapter, then only asks whether they have changed. One thread.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[str, Any, bytes | None]] = {}
        self._said: set[str] = set()

    def key(self, adapter: LoRARequest) -> bytes | None:
        """A digest; None for an adapter whose content cannot be told any more."""
        known = self._known.get(adapter.lora_int_id)
        path = adapter.lora_path
        try:
            stamp = adapter_stamp(path)
            if known is None or getattr(adapter, "load_inplace", False) or known[0] != path:
                digest = adapter_digest(path)
                known = (path, stamp, None if digest is None else bytes.fromhex(digest))
                self._known[adapter.lora_int_id] = known
        except OSError as error:
            self._say_once(
                f"s3kv does not cache requests with the adapter {adapter.lora_name!r}: its files "
                f"cannot be read here ({error})"
            )
            return None
        if known[1] != stamp:
            self._say_once(
                f"s3kv no longer caches requests with the adapter {adapter.lora_name!r}: its files "
                f"in {path} were changed after it was loaded; load it under a new name"
            )
            return None
        return known[2]

    def _say_once(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            logger.warning("%s", message)


class RequestHashes:
    """Answers for one engine. One thread."""

    def __init__(self) -> None:
        self._adapters = Adapters()
        self._said = False

    def of(self, request: Request) -> Sequence[bytes]:
        """The hashes of the request's blocks, or none at all when it must not be cached."""
        features = getattr(request, "mm_features", None) or ()
        if not names_are_hashes(feature.identifier for feature in features):
            if not self._said:
                self._said = True
                logger.warning(
                    "s3kv does not cache requests whose images have names given by the client: "
                    "nothing says that the same name is the same image in another engine"
                )
            return ()
        hashes: Sequence[bytes] = request.block_hashes
        if request.lora_request is None:
            return hashes
        key = self._adapters.key(request.lora_request)
        return () if key is None else DerivedHashes(hashes, key)


def names_are_hashes(names: Iterable[str]) -> bool:
    return all(map(_CONTENT_HASH.fullmatch, names))
