"""State machines as tables: their states, their events, and the state that each event leads to."""

from __future__ import annotations

import enum
from typing import TypeVar


class IdentityEnum(enum.Enum):
    """Enum of states or events, hashed by identity. `Enum` would call Python code for it."""

    __hash__ = object.__hash__


S = TypeVar("S", bound=IdentityEnum)
E = TypeVar("E", bound=IdentityEnum)


class Transitions(dict[tuple[S, E], S]):
    """Table of every legal event in every state, and the state that it leads to."""

    def after(self, state: S, event: E) -> S:
        """The state that `event` leads to. Raises AssertionError if it is not legal."""
        try:
            return self[state, event]
        except KeyError:
            raise AssertionError(f"{event} is not possible in {state}") from None
