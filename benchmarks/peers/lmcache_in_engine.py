"""Lets vLLM's CPU engine start where LMCache is imported. Nothing of LMCache is replaced: its
multi-process mode serves CPUs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

FOLDER = "PEERS_FOLDER"
"""Variable with the folder from which the model's path is given."""


def prepare() -> None:
    """For `Engine(prepare=…)`. vLLM's CPU worker asks every object in every module for its
    `__dict__`. An object of llvmlite, which LMCache imports, answers with a C function."""
    from vllm.triton_utils import dispatcher

    def dict_of(value: Any) -> Mapping[str, Any]:
        found = vars(value)
        return found if isinstance(found, Mapping) else {}

    dispatcher.vars = dict_of
    os.chdir(os.environ[FOLDER])
