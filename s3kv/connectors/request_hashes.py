"""Hashes of a request's blocks, for the inputs that vLLM's own hashes do not cover.

vLLM hashes an adapter (LoRA) by its name and path, and an image by its name, which may be the
client's. Many engines share a bucket, and it outlives them, so:

- hashes of blocks computed with an adapter include a digest of the files that the workers have
  loaded, see `adapters`;
- hashes of blocks computed with images include digests of the encoder's input, see `media`;
- hashes of blocks computed with embeddings include which positions they fill, see
  `cover_inputs`;
- a request is not cached at all if one of these is unknown.

tests/contract/kv_relevance/requests.toml classifies every other input of a request.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import wraps
from hashlib import blake2b
from inspect import signature
from typing import TYPE_CHECKING, Any

from vllm.v1.core import kv_cache_utils

from s3kv.connectors.media import MediaDigests, MediaNames, placed
from s3kv.types import Tally

if TYPE_CHECKING:
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.request import Request

logger = logging.getLogger("s3kv")

_UNKNOWN_MEDIA = (
    "images, because the engine does not know their content: it does not have their tensors "
    "(processor cache of type shm, metadata alone), or one name has stood for two images; see "
    "trust_media_names"
)
_TOO_MANY_MEDIA = "new images, because a million others came before: restart the engine for them"
_UNKNOWN_INPUTS = (
    "prompt embeddings or token types, because block hashes may not cover them: only one of "
    "prompt_token_ids and prompt_is_token_ids is given, or this version of vLLM hashes prompts in "
    "a way that s3kv does not know"
)


class DerivedHashes(Sequence[bytes]):
    """A view of `hashes`, which may grow. Each hash is derived when it is read, with the adapter
    and with the media that begin before the end of its block. So turns of a conversation share the
    blocks before the next image.

    adapter: the digest of the adapter; empty without one. features, contents: the request's media,
    and the digest of each. The view is empty once `features` has grown, as it does in a session.
    """

    def __init__(
        self,
        hashes: Sequence[bytes],
        adapter: bytes,
        features: Sequence[MultiModalFeatureSpec] = (),
        contents: Iterable[bytes] = (),
        block_tokens: int = 1,
    ) -> None:
        self._hashes, self._features, self._block_tokens = hashes, features, block_tokens
        self._starts = [feature.mm_position.offset for feature in features]
        self._keys = [adapter]
        """Hash key by the number of media that have begun."""
        for content in contents:
            self._keys.append(blake2b(content, key=self._keys[-1], digest_size=32).digest())

    def __len__(self) -> int:
        return len(self._hashes) if len(self._features) == len(self._starts) else 0

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, int):
            return self._derive(range(len(self))[index])
        return [self._derive(block) for block in range(*index.indices(len(self)))]

    def _derive(self, block: int) -> bytes:
        key = self._keys[bisect_left(self._starts, (block + 1) * self._block_tokens)]
        block_hash = self._hashes[block]
        return blake2b(block_hash, key=key, digest_size=32).digest() if key else block_hash


def cover_inputs() -> bool:
    """Make vLLM's block hashes in this process cover the inputs that they leave out (`_left_out`).
    Returns False, and changes nothing, if this vLLM hashes prompts in a way that s3kv does not
    know. Called before the engine's first request; later calls change nothing.

    Hashes derived later, as for media, would not be enough: vLLM's own cache would still serve one
    such prompt with the blocks of another, and s3kv saves the blocks that a request has.
    """
    hash_keys: Any = getattr(kv_cache_utils, "_gen_prompt_embeds_extra_hash_keys", None)
    if hasattr(hash_keys, "covers_inputs"):
        return True
    if hash_keys is None or len(signature(hash_keys).parameters) != 3:
        return False

    @wraps(hash_keys)
    def covering(request: Request, start: int, end: int) -> list[Any]:
        keys: list[Any] = hash_keys(request, start, end)
        if rest := _left_out(request, start, end):
            keys = [*keys, ("inputs", blake2b(repr(rest).encode(), digest_size=32).digest())]
        return keys

    covering.covers_inputs = True  # type: ignore[attr-defined]
    kv_cache_utils._gen_prompt_embeds_extra_hash_keys = covering
    return True


def _left_out(request: Request, start: int, end: int) -> list[Any]:
    """The inputs of the model from `start` to `end` that vLLM's block hash leaves out.

    It covers the bytes of a prompt's embeddings, and the token ids with 0 where an embedding
    stands. It covers neither the mask that chooses between the two (vllm#56655), nor the
    embeddings' number format, nor the ids behind them, which some models read, nor token types.
    """
    rest: list[Any] = []
    if request.prompt_embeds is not None:
        ids, mask = request.prompt_token_ids, request.prompt_is_token_ids
        rest += [request.prompt_embeds.dtype, ids and ids[start:end], mask and mask[start:end]]
    extra = request.pooling_params and request.pooling_params.extra_kwargs
    if extra and "compressed_token_type_ids" in extra:
        rest.append(extra["compressed_token_type_ids"])
    return rest


class RequestHashes:
    """The hashes of one engine's requests. Used from one thread.

    trust_media_names: an image's name stands for its content, even if a client gave the name.
    block_tokens: tokens per block hash of vLLM's.
    """

    def __init__(self, *, trust_media_names: bool, block_tokens: int) -> None:
        self._trusts = trust_media_names
        self._block_tokens = block_tokens
        self._digests = MediaDigests()
        self._names = MediaNames()
        self.counters = Tally()
        self._used: dict[str, tuple[str, ...]] = {}
        """The names of each living request's media, in their order."""
        self._barred: set[str] = set()
        self._covers_inputs = cover_inputs()
        self._logged: set[str] = set()

    def of(self, request: Request, adapter: bytes | None) -> Sequence[bytes]:
        """The hashes of the request's blocks; none if the request must not be cached.

        adapter: the digest of the request's adapter; None if unknown. It is ignored for a request
        without an adapter.
        """
        if not self._is_known(request):
            self._warn_once(_UNKNOWN_INPUTS)
            return ()
        features = () if self._trusts else request.mm_features
        may_grow = not self._trusts and getattr(request, "resumable", False)
        contents = self._contents(request) if features or may_grow else []
        key = b"" if request.lora_request is None else adapter
        if contents is None or key is None:
            return ()
        hashes: Sequence[bytes] = request.block_hashes
        if not (features or may_grow or key):
            return hashes
        return DerivedHashes(hashes, key, features, contents, self._block_tokens)

    def _is_known(self, request: Request) -> bool:
        """Whether the hashes cover the model's whole input. With embeddings and only one of ids and
        mask, vLLM's two model runners disagree on that input."""
        if not _left_out(request, 0, 0):
            return True
        has_both = (request.prompt_token_ids is None) == (request.prompt_is_token_ids is None)
        return self._covers_inputs and (has_both or request.prompt_embeds is None)

    def _contents(self, request: Request) -> list[bytes] | None:
        """The digests of the request's media; None if the request must not be cached."""
        features, is_new = request.mm_features, request.request_id not in self._used
        self._used[request.request_id] = tuple(feature.identifier for feature in features)
        contents, disputed = [], False
        for feature in features:
            if (content := self._digests.of(feature)) is not None:
                content = placed(feature, content)
                contents.append(content)
            disputed |= self._is_disputed(feature.identifier, content)
        if disputed:
            self.counters["requests_untrusted"] += is_new
            known = all(self._names.has(feature.identifier) for feature in features)
            self._warn_once(_UNKNOWN_MEDIA if known else _TOO_MANY_MEDIA)
        return None if disputed else contents

    def _is_disputed(self, name: str, content: bytes | None) -> bool:
        """Whether the content of the name is uncertain. If so, bars all requests that use it."""
        if not self._names.disputed(name, content):
            return False
        self._barred.update(request for request, names in self._used.items() if name in names)
        return True

    def scheduled(self, request_id: str, features: Sequence[MultiModalFeatureSpec]) -> None:
        """Note that the engine is about to compute this request. Media added since it arrived, as
        in a session, have unknown content, even under a name that it already had. So nothing
        computed with their names is cached."""
        if self._trusts or not features:
            return
        known = self._used.get(request_id, ())
        new = tuple(feature.identifier for feature in features[len(known) :])
        self._used[request_id] = known + new
        for name in new:
            self._is_disputed(name, None)

    def take_barred(self) -> set[str]:
        """Living requests that must no longer be saved or loaded, each returned once."""
        barred, self._barred = self._barred, set()
        return barred

    def finished(self, request_id: str) -> None:
        self._used.pop(request_id, None)
        self._barred.discard(request_id)

    def _warn_once(self, reason: str) -> None:
        if reason not in self._logged:
            self._logged.add(reason)
            logger.warning("s3kv does not cache a request with %s. This is logged once", reason)
