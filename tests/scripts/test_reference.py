"""The reference leaves nothing public out."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest

from s3kv.config import Config
from s3kv.library.tiered_store import TieredStore
from scripts import reference


@pytest.mark.parametrize("described", [TieredStore, Config])
def test_every_public_method_is_described(described: type[Any]) -> None:
    (methods,) = (m for _, name, _, m in reference.PUBLIC if name == described.__name__)
    internal = {"fetches_at_once", "pool_size", "staging_bytes"}
    public = {
        name
        for name, member in inspect.getmembers(described)
        if not name.startswith("_")
        and (inspect.isfunction(member) or isinstance(member, property) or inspect.ismethod(member))
    }
    assert public - (internal if described is Config else set()) == set(methods)


def test_signatures_are_python() -> None:
    for code in re.findall(
        r"```python\n(.*?)```", reference.page().partition("<!-- BEGIN")[2], re.DOTALL
    ):
        compile(code if "def " not in code else code.rstrip() + ": ...\n", "page", "exec")
