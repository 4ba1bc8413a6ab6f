"""The `vllm.general_plugins` entry point: registers the connectors with vLLM by name."""

from __future__ import annotations


def register() -> None:
    """Register the connectors. vLLM calls this in every process, possibly more than once."""
    from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    for factory, name, module in (
        (KVConnectorFactory, "S3KVConnector", "s3kv.connectors.kv"),
        (ECConnectorFactory, "S3ECConnector", "s3kv.connectors.ec"),
    ):
        if name not in factory._registry:
            factory.register_connector(name, module, name)
