"""The vLLM that is installed, and tests of what not every version has."""

from __future__ import annotations

import importlib.util
from importlib import import_module, metadata
from typing import Any

import pytest

from scripts.matrix import NEWER, host


def _installed() -> tuple[int, int]:
    try:
        major, minor, *_ = host()["vllm"].split(".")
    except metadata.PackageNotFoundError:
        return 0, 0
    return int(major), int(minor)


VERSION = _installed()
"""Major and minor version of the vLLM that is installed; (0, 0) if there is none."""


def newer(what: str = "this") -> str:
    """Why a test is skipped whose subject first appeared in a later version. The table of versions
    tells these tests from others that are skipped."""
    return f"{NEWER} {VERSION[0]}.{VERSION[1]}: {what}"


def since(major: int, minor: int, what: str = "this") -> pytest.MarkDecorator:
    """A test of `what`, which vLLM has from this version on."""
    return pytest.mark.skipif((major, minor) > VERSION, reason=newer(what))


def serve_parser() -> Any:
    """The parser of `vllm serve`."""
    places = (f"vllm.entrypoints.{place}.cli_args" for place in ("launchers", "common"))  # 0.33
    module = next(filter(importlib.util.find_spec, places))
    parser = import_module("vllm.utils.argparse_utils").FlexibleArgumentParser
    return import_module(module).make_arg_parser(parser(prog="vllm serve"))
