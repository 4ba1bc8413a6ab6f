"""A KV connector that stands beside s3kv's under vLLM's `MultiConnector`, and makes trouble.

Settings (`kv_connector_extra_config`):
    greets      answer vLLM's handshake, and fail when given another's answer, as NIXL does
    offers      so many tokens of every prompt that the engine has not itself, at once, and load
                nothing: what is in the blocks by then is what the engine computes with
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)


@dataclass(frozen=True)
class Greeting(KVConnectorHandshakeMetadata):
    said: str = "hello"


class Nothing(KVConnectorMetadata):
    """It has no orders for its workers."""


class Neighbour(KVConnectorBase_V1, SupportsHMA):
    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        settings = self._kv_transfer_config.kv_connector_extra_config
        self._greets = bool(settings.get("greets"))
        self._offers = int(settings.get("offers", 0))

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return Greeting() if self._greets else None

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[Any, Any]) -> None:
        if self._greets:
            assert all(isinstance(told, Greeting) for told in metadata.values()), metadata

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return max(0, self._offers - num_computed_tokens), False

    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None: ...

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return Nothing()

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None: ...

    def wait_for_save(self) -> None: ...
