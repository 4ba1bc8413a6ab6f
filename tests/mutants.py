"""Code with one thing done wrong, which tests have to notice.

A mutant takes a `pytest.MonkeyPatch` and breaks the code for as long as that lasts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Patch = pytest.MonkeyPatch
Mutant = Callable[[Patch], None]


class Mutants(list[Mutant]):
    """A list, and the decorators that add to it."""

    def mutant(self, of: Mutant) -> Mutant:
        self.append(of)
        return of

    def swap(self, name: str, holder: object, attribute: str, value: object) -> Mutant:
        """The mutant of this name, which puts a value in the place of an attribute."""

        def mutate(patch: Patch) -> None:
            patch.setattr(holder, attribute, value)

        mutate.__name__ = name
        return self.mutant(mutate)

    def instead_of(self, holder: object, name: str) -> Callable[[Callable[..., Any]], Mutant]:
        """For a function that a mutant puts in the place of an attribute."""
        return lambda function: self.swap(function.__name__, holder, name, function)
