"""Empty modules in place of torchvision, without which vLLM does not import the text model of
Qwen3.5: for `Engine(prepare=…)`."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_NAMES = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2")
_FUNCTIONS = "torchvision.transforms.v2.functional"


def without_torchvision() -> None:
    """Let vLLM import Qwen3.5, whose module has the model with pictures in it, too.

    Transformers looks for torchvision first and goes on without; of the empty modules that follow,
    only names are imported.
    """
    import transformers.image_utils  # noqa: F401 - looks for torchvision

    for name in (*_NAMES, _FUNCTIONS):
        module: Any = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        module.__path__ = []
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)

    from vllm import ModelRegistry
    from vllm.model_executor.models.qwen3_5 import Qwen3_5ForCausalLM

    # As a class: vLLM would import a name in a process of its own.
    ModelRegistry.register_model("Qwen3_5ForCausalLM", Qwen3_5ForCausalLM)
