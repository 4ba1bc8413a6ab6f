"""Contents of a manifest: the fingerprint of a namespace as leaves that can be compared. Pure.

`upkeep.registration` writes the manifest; `s3kv ls --summary` compares those of a prefix.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

MAX_MANIFEST_BYTES = 2**18
_MAX_NAME_CHARS = 1000


def leaves(text: bytes) -> dict[str, str] | None:
    """Every leaf of a manifest: dotted name to JSON. None if `text` is not a JSON object: anyone
    with write access to the bucket may have written it."""
    try:
        tree = json.loads(text)
        return _flat(tree, "", {}) if isinstance(tree, Mapping) else None
    except (ValueError, RecursionError):
        return None


def _flat(tree: Any, name: str, flat: dict[str, str]) -> dict[str, str]:
    if isinstance(tree, Mapping) and tree:
        items = list(tree.items())
    elif isinstance(tree, list) and tree:
        items = list(enumerate(tree))
    else:
        items = []
        flat[name] = json.dumps(tree)
    for key, value in items:
        _flat(value, (f"{name}.{key}" if name else str(key))[:_MAX_NAME_CHARS], flat)
    return flat
