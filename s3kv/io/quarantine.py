"""Objects that are known to be bad, so that nobody asks for them again. Pure."""

from __future__ import annotations

CAPACITY_KEYS = 10_000
"""About 3 MB. A bucket with more bad objects than that has another problem; the oldest are
forgotten, and cost one more request when they are asked for."""


class Quarantine:
    """Keys whose object was not what the key says, since this process last looked."""

    def __init__(self, capacity_keys: int = CAPACITY_KEYS) -> None:
        self._capacity_keys = capacity_keys
        self._keys: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: str) -> bool:
        return key in self._keys

    def add(self, key: str) -> None:
        self._keys[key] = None
        if len(self._keys) > self._capacity_keys:
            del self._keys[next(iter(self._keys))]

    def lift(self, key: str) -> None:
        """The object under this key is a new one, or none."""
        self._keys.pop(key, None)
