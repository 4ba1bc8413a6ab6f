"""The compiler of Triton's "cpu" backend: refuses to compile, because the interpreter runs all."""

from __future__ import annotations

from types import ModuleType
from typing import Any, NoReturn

from triton.backends.compiler import BaseBackend, GPUTarget


class NoCompiler(BaseBackend):
    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        return bool(target.backend == "cpu")

    def hash(self) -> str:
        return "interpreted"

    def parse_options(self, options: dict[str, Any]) -> NoReturn:
        raise RuntimeError("a kernel is to be compiled: TRITON_INTERPRET=1 is not set")

    def add_stages(self, stages: dict[str, Any], options: object, language: Any) -> None:
        pass

    def load_dialects(self, context: Any) -> None:
        pass

    def get_module_map(self) -> dict[str, ModuleType]:
        return {}
