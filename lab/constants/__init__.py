"""s3kv with other constants: for runs whose outcome may not depend on the speed of the machine.

`changed` covers this process and the processes that it starts, `environment` other processes.
`split` and `split_connector` take the constants out of settings, so that tests give both in one
place. Names and units are those of `PLACES`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

_VARIABLE = "LAB_CONSTANTS"
_HERE = Path(__file__).resolve().parent
_PATH = (str(_HERE / "path"), str(_HERE.parent.parent))
PLACES: dict[str, tuple[str, ...]] = {
    "aws_hosts": ("s3kv.upkeep.costs:AWS_HOSTS",),
    "barred_s": ("s3kv.io.sources.quarantine:BARRED_S",),
    "compressed_segment_bytes": ("s3kv.objects.envelope:SEGMENT_BYTES",),
    "bucket_min_age_s": ("s3kv.upkeep.housekeeping:MIN_AGE_S",),
    "encrypted_segment_bytes": (
        "s3kv.io.sources.encrypted_store:SEGMENT_BYTES",
        "s3kv.io.sources.ranges:SEGMENT_BYTES",
        "s3kv.objects.encryption:SEGMENT_BYTES",
    ),
    "hedge_percent": ("s3kv.io.sources.bucket:HEDGE_PERCENT",),
    "least_compressed_bytes": ("s3kv.objects.envelope:LEAST_PAYLOAD_BYTES",),
    "max_attempts": ("s3kv.io.sources.bucket:MAX_ATTEMPTS",),
    "max_inflight_bytes": (
        "s3kv.config:MAX_INFLIGHT_BYTES",
        "s3kv.io.server.service:MAX_INFLIGHT_BYTES",
    ),
    "max_item_bytes": (
        "s3kv.connectors.ec_worker:MAX_ITEM_BYTES",
        "s3kv.planning.ec:ECPlannerSettings.max_item_bytes",
    ),
    "max_saves_inflight": ("s3kv.planning.kv:KVPlannerSettings.max_saves_inflight",),
    "min_bytes_per_s": ("s3kv.stores.s3.fast_client:MIN_BYTES_PER_S",),
    "miss_ttl_s": ("s3kv.planning.index:BucketIndex.miss_ttl_s",),
    "network_threads": ("s3kv.stores.s3.s3_store:NETWORK_THREADS",),
    "probe_chunks": ("s3kv.planning.kv:KVPlannerSettings.probe_chunks",),
    "range_bytes": ("s3kv.io.sources.bucket:RANGE_BYTES",),
    "recompute_gate": (
        "s3kv.planning.ec:ECPlannerSettings.recompute_gate",
        "s3kv.planning.kv:KVPlannerSettings.recompute_gate",
        "s3kv.planning.offload:OffloadPlanner.recompute_gate",
    ),
    "stall_s": ("s3kv.io.server.process:STALL_S",),
    "start_timeout_s": ("s3kv.io.tier:START_TIMEOUT_S", "s3kv.io.wire:START_TIMEOUT_S"),
}
"""Constants by name: attributes of modules, or arguments of classes that have a default."""


def split(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings of `Config`, and constants."""
    constants = {name: value for name, value in settings.items() if name in PLACES}
    return {name: settings[name] for name in settings if name not in PLACES}, constants


def split_connector(connector: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """vLLM's kv_transfer_config or ec_transfer_config without constants, and the constants in it,
    those of the connectors of a MultiConnector and of secondary tiers included."""
    key = next((key for key in connector if key.endswith("_connector_extra_config")), None)
    if key is None:
        return dict(connector), {}
    extra, constants = split(connector[key])
    if "connectors" in extra:
        several = [split_connector(one) for one in extra["connectors"]]
        extra["connectors"] = [one for one, _ in several]
        constants = {name: one[name] for _, one in several for name in one}
    if "secondary_tiers" in extra:
        tiers = [split(one) for one in extra["secondary_tiers"]]
        extra["secondary_tiers"] = [one for one, _ in tiers]
        constants |= {name: one[name] for _, one in tiers for name in one}
    return {**connector, key: extra}, constants


def environment(constants: Mapping[str, Any], python_path: str | None = None) -> dict[str, str]:
    """The variables of a process with these constants. python_path: its PYTHONPATH without them."""
    path = os.environ.get("PYTHONPATH", "") if python_path is None else python_path
    return {
        "PYTHONPATH": os.pathsep.join(folder for folder in (path, *_PATH) if folder),
        _VARIABLE: json.dumps(dict(constants)),
    }


@contextlib.contextmanager
def changed(**constants: Any) -> Iterator[None]:
    """Other constants during the block, in this process and in those that it starts."""
    with contextlib.ExitStack() as stack:
        for name, value in constants.items():
            for place in PLACES[name]:
                module, _, attribute = place.partition(":")
                holder, key = _place(importlib.import_module(module), attribute)
                stack.enter_context(mock.patch.dict(holder, {key: value}))
        inherited = json.loads(os.environ.get(_VARIABLE, "{}"))
        stack.enter_context(mock.patch.dict(os.environ, environment(inherited | constants)))
        yield


def change_on_import() -> None:
    """Change the constants that the environment names by the time their modules are imported."""
    sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    def find_spec(
        self, name: str, path: Any, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not name.startswith("s3kv."):
            return None
        wanted = [
            (place.partition(":")[2], value)
            for constant, value in json.loads(os.environ.get(_VARIABLE, "{}")).items()
            for place in PLACES[constant]
            if place.startswith(f"{name}:")
        ]
        spec = PathFinder.find_spec(name, path) if wanted else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            for attribute, value in wanted:
                holder, key = _place(module, attribute)
                holder[key] = tuple(value) if isinstance(value, list) else value

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _place(module: ModuleType, attribute: str) -> tuple[dict[str, Any], str]:
    """The dictionary that has the value, and the key."""
    owner, _, argument = attribute.partition(".")
    if not argument:
        return vars(module), attribute
    defaults = vars(module)[owner].__init__.__kwdefaults__
    assert argument in defaults, f"{attribute} has no default"
    return defaults, argument
