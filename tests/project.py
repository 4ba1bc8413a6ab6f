"""The project itself, as tests look at it: where it is, and what its pyproject.toml declares."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent


def makeflags(folder: Path, arguments: str = "") -> str:
    """MAKEFLAGS that leave the words of a `make` as they are: it uses this interpreter instead of
    making an environment, for which it needs a file in `folder`. arguments: ARGS, one word."""
    stamp = folder / "stamp"
    stamp.touch()
    return f"STAMP={stamp} BIN={Path(sys.executable).parent} ARGS={arguments}"


def skip_or_fail(reason: str) -> NoReturn:
    """Skip a test for what this machine lacks. On CI, where nothing may be lacking, it fails."""
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


def plant(root: Path, files: dict[str, str]) -> None:
    """Write files with this content, by their paths below `root`."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def declared() -> dict[str, Any]:
    """The table `project` of pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def extras() -> dict[str, list[str]]:
    """The extras, and what each asks for."""
    return declared()["optional-dependencies"]
