"""The EC connector against vLLM's interface. For its hooks see test_vllm_api.py."""

from __future__ import annotations

from types import SimpleNamespace

from s3kv.connectors import S3ECConnector
from s3kv.connectors.plugin import register


def test_the_name_alone_is_enough() -> None:
    from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory

    register()
    register()
    config = SimpleNamespace(ec_connector="S3ECConnector", ec_connector_module_path=None)
    assert ECConnectorFactory.get_connector_class(config) is S3ECConnector
