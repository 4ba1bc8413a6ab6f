"""vLLM's OffloadingConnector with one secondary tier, configured for an engine on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def offloading(tier: Mapping[str, Any], host_bytes: int, **settings: Any) -> dict[str, Any]:
    """A kv_transfer_config. `lab.offloading_on_cpu` stands in for the GPU, and for nothing else.

    tier: its entry in `secondary_tiers`. host_bytes: of the primary tier. settings: others of the
    connector; without `block_size` a chunk is one block of each group.
    """
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "TieringOnCpu",
            "spec_module_path": "lab.offloading_on_cpu",
            "cpu_bytes_to_use": host_bytes,
            "secondary_tiers": [dict(tier)],
        }
        | settings,
    }
