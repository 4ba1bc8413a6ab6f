"""Adapters (LoRA) in the scheduler's view, from the workers' reports.

vLLM hashes an adapter by name and path, not by content. So chunks computed with an adapter are kept
under hashes that include the digest of the files that the workers loaded
(docs/decisions/0009-adapters-by-their-load.md).

This module reads no adapter files. Steps are numbered, and each report names its step. A report is
valid for a request if its step was planned after the request arrived: it then includes all earlier
loads, even those outside a step. Runs on the scheduler's thread.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from s3kv.connectors.adapter_loads import (
    NO_STEP,
    AdapterReport,
    AdapterStep,
    LoadedAdapter,
    hashed_name,
)

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

logger = logging.getLogger("s3kv")

_MAX_WAIT_S = 10.0
"""Longest wait for a report, far longer than a step. Without one, the request is not cached."""


@dataclass(slots=True)
class _Use:
    """A request's adapter. believed: the adapter from which its hashes are derived; None if the
    request is not cached.

    from_step, until_s: the step whose report settles the adapter, and the latest time to settle it.
    """

    adapter: LoRARequest
    name: str
    believed: LoadedAdapter | None
    from_step: int
    until_s: float
    settled: bool = False


class KnownAdapters:
    """The adapters of one engine. Tracks each request from `arrived` to `finished`."""

    def __init__(self) -> None:
        self._by_id: dict[int, LoadedAdapter] = {}
        self._step = NO_STEP
        self._uses: dict[str, _Use] = {}
        self._names: dict[int, str] = {}
        """For each vLLM adapter number, the hashed name that a request last used with it."""
        self._spoiled, self._logged = set[str](), set[str]()

    def next_step(self) -> AdapterStep:
        """Number a step that is being planned. Returns this and the last reported number."""
        self._step = AdapterStep(self._step.number + 1, self._step.reported)
        return self._step

    def on_report(self, report: AdapterReport) -> list[str]:
        """Process the merged report of all ranks. Returns the requests whose hashes are derived
        from outdated adapter content."""
        self._step = AdapterStep(self._step.number, report.number)
        if report.by_id == self._by_id:  # as in nearly every step
            return []
        self._by_id = report.by_id
        outdated = []
        for request_id, use in self._uses.items():
            loaded = self._by_id.get(use.adapter.lora_int_id)
            if use.settled and use.believed is not None and use.believed != loaded:
                use.believed = None
                outdated.append(request_id)
        return outdated

    def arrived(self, request_id: str, adapter: LoRARequest, now_s: float) -> bytes | None:
        """Register a new request. Returns the current digest from which to derive its hashes; None
        if the request must not be cached."""
        use = _Use(adapter, hashed_name(adapter), None, self._step.number + 1, now_s + _MAX_WAIT_S)
        use.believed = self._loaded(use)
        self._uses[request_id] = use
        return None if use.believed is None else use.believed.digest

    def waits(self, request_id: str, now_s: float) -> bool:
        """Whether an outstanding report may still change the digest for this request."""
        use = self._uses.get(request_id)
        if use is None or use.settled:
            return False
        return self._step.reported < use.from_step and now_s < use.until_s

    def settle(self, request_id: str) -> tuple[bool, bytes | None]:
        """Fix the request's adapter before the request is computed. Returns whether the digest from
        `arrived` still holds, and the current digest. Later calls, and calls for a request without
        an adapter, return (True, None)."""
        use = self._uses.get(request_id)
        if use is None or use.settled:
            return True, None
        use.settled = True
        believed, use.believed = use.believed, self._certain(use)
        if use.believed is None and use.name not in self._logged:
            self._logged.add(use.name)
            logger.info(
                "s3kv: a request with the adapter %s is not cached: the workers have not loaded it "
                "yet, or cannot be certain of its content (see their log)",
                use.name,
            )
        return use.believed == believed, None if use.believed is None else use.believed.digest

    def finished(self, request_id: str) -> None:
        self._uses.pop(request_id, None)

    def _certain(self, use: _Use) -> LoadedAdapter | None:
        """The adapter that the request will be computed with. Another may have the same number."""
        number = use.adapter.lora_int_id
        previous, self._names[number] = self._names.get(number, use.name), use.name
        loaded = self._by_id.get(number) if self._step.reported >= use.from_step else None
        if loaded is None and previous != use.name:
            # Two names share one number, so either adapter may be loaded.
            self._spoiled |= {previous, use.name}
        elif loaded is not None and loaded.name != use.name:
            self._spoiled.add(use.name)
        return None if loaded is None else self._loaded(use)

    def _loaded(self, use: _Use) -> LoadedAdapter | None:
        loaded = self._by_id.get(use.adapter.lora_int_id)
        if loaded is None or loaded.name != use.name or use.name in self._spoiled:
            return None
        # A request with `load_inplace` reads the files again in each of its steps.
        return None if getattr(use.adapter, "load_inplace", False) else loaded
