"""vLLM is imported here, once: fleets of tiers run under its own manager."""

from __future__ import annotations

from tests.vllm_import import import_vllm

collect_ignore = [] if import_vllm() else ["test_simulation.py"]
