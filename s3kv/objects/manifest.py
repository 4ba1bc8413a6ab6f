"""Contents of a manifest: the fingerprint of a namespace as leaves that can be compared. Pure.

`upkeep.registration` writes the manifest; `s3kv ls --summary` compares those of a prefix.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

MAX_MANIFEST_BYTES = 2**18
_MAX_NAME_CHARS = 1000
_MOST_LEAVES = 10_000
"""Far more than an engine writes. A leaf may take 500 times the memory of its text."""


def leaves(text: bytes) -> dict[str, str] | None:
    """Every leaf of a manifest: dotted name, escaped as in JSON, to JSON. None if `text` is not a
    JSON object or has too many leaves: anyone with write access may have written it."""
    try:
        tree = json.loads(text)
        return _flat(tree, "", {}) if isinstance(tree, Mapping) else None
    except (ValueError, RecursionError):
        return None


def _flat(tree: Any, name: str, flat: dict[str, str]) -> dict[str, str]:
    if not isinstance(tree, Mapping | list) or not tree:
        flat[name] = json.dumps(tree)
        if len(flat) > _MOST_LEAVES:
            raise ValueError("too many leaves")
        return flat
    for key, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
        part = json.dumps(str(key))[1:-1]  # it may hold what controls a terminal
        _flat(value, (f"{name}.{part}" if name else part)[:_MAX_NAME_CHARS], flat)
    return flat
