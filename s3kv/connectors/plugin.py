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
    try:
        from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
    except ImportError:  # pragma: no cover - a vLLM whose offloading has no tiers
        return
    if "s3kv" not in SecondaryTierFactory._registry:
        SecondaryTierFactory.register_tier("s3kv", "s3kv.connectors.offload_tier", "S3Tier")
