"""The `vllm.general_plugins` entry point: makes the connectors known to vLLM by name alone."""

from __future__ import annotations


def register() -> None:
    """Called by vLLM in every process, possibly more than once."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    name = "S3KVConnector"
    if name not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(name, "s3kv.connectors.kv", name)
