"""Opening of a store: with `await` or `async with`, and under a namespace of plain values."""

from __future__ import annotations

import reprlib
from collections.abc import Coroutine, Generator, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Generic, TypeVar

from s3kv.errors import ConfigError
from s3kv.objects.keys import canonical_json, fingerprint_digest

S = TypeVar("S", bound=AbstractAsyncContextManager[Any])

MAX_NAMESPACE_BYTES = 64 * 2**10
"""Longest namespace, as JSON. It travels to the I/O process in one frame, and into the manifest."""


class Opening(Generic[S]):
    """A store about to be opened. Use it once, in one of two ways:

    store = await Store.open(...)            # and then: await store.close()
    async with Store.open(...) as store:     # which closes it
    """

    def __init__(self, opening: Coroutine[Any, Any, S]) -> None:
        self._opening = opening

    def __await__(self) -> Generator[Any, Any, S]:
        return self._opening.__await__()

    async def __aenter__(self) -> S:
        self._store = await self._opening
        return self._store

    async def __aexit__(self, *_: object) -> None:
        await self._store.__aexit__(None, None, None)


def plain_namespace(namespace: Mapping[str, Any]) -> dict[str, Any]:
    """The namespace as a plain dictionary. Raises `ConfigError` unless it consists of JSON values
    with text keys, or if it is longer than `MAX_NAMESPACE_BYTES`."""
    try:
        plain = dict(namespace)
        fingerprint_digest(plain)
        nbytes = len(canonical_json(plain))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"namespace is {reprlib.repr(namespace)}: allowed is a mapping of texts to numbers, "
            f"texts, booleans, None, and lists and mappings of these ({error})"
        ) from error
    if nbytes > MAX_NAMESPACE_BYTES:
        raise ConfigError(
            f"namespace has {nbytes} bytes as JSON: allowed are at most {MAX_NAMESPACE_BYTES}. "
            "A digest of a long description identifies it as well"
        )
    return plain
