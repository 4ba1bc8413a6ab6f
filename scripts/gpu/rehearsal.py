"""The engine of `scripts.gpu.engine` without a GPU: configured, its model built.

Importing this module imports the engine, in the environment that every rehearsal has.
vLLM takes this machine for one with a GPU, as far as it asks NVML and Triton; `compiled.py` stands
in for its compiled modules. Nothing computes. Raises what vLLM raises.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from lab.engine import ENVIRONMENT

RUNNERS = {"1": "vllm.v1.worker.gpu_model_runner", "2": "vllm.v1.worker.gpu.model_runner"}
MODULES = (
    *("lab.child", "lab.audit", "lab.on_cpu", "s3kv.connectors.kv", "s3kv.connectors.offload_tier"),
    *("vllm.v1.worker.gpu_worker", "vllm.v1.kv_offload.cpu.gpu_worker"),
    "vllm.model_executor.kernels.linear.cute_dsl.ll_bf16",
    "vllm.model_executor.layers.quantization.online.base",  # which loads weights, whatever they are
)
WITH_TORCHVISION = "vllm.model_executor.warmup.minimax_m3_msa_warmup"
"""What a worker on CUDA imports when it warms up. Where it could not, the result says so."""
BACKENDS = {"FLASH_ATTN", "FLASH_ATTN_MLA"}


def rehearse(model: Path, engine_args: dict[str, Any], runner: str, folder: Path) -> dict[str, Any]:
    """What was found. folder: an empty one, for files that last as long as this."""
    importlib.import_module(RUNNERS[runner])
    torchvision = importlib.util.find_spec("torchvision") is not None
    if torchvision:
        importlib.import_module(WITH_TORCHVISION)
    config = _configured(model, engine_args, runner)
    specs = _built(config, folder)
    if not specs or not {spec["backend"] for spec in specs.values()} <= BACKENDS:
        raise RuntimeError(f"would run attention of {specs}, not of {BACKENDS}")
    return {"kv": specs, "torchvision": torchvision}


def _pretend() -> None:
    """Before anything else of vLLM is imported."""
    from vllm.third_party import pynvml

    answers = {
        "nvmlInit": None,
        "nvmlShutdown": None,
        "nvmlDeviceGetCount": 1,
        "nvmlDeviceGetHandleByIndex": 0,
        "nvmlDeviceGetCudaComputeCapability": (9, 0),
        "nvmlDeviceGetName": "a GPU that is not there",
        "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=80 * 2**30),
    }
    for name, answer in answers.items():
        setattr(pynvml, name, lambda *_, answer=answer: answer)
    if importlib.util.find_spec("triton") is not None:
        from triton.backends import backends

        backends["nvidia"].driver.is_active = lambda: True
    for name in ("Stream", "Event"):  # those of a model with experts
        setattr(torch.cuda, name, type(name, (), {}))
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        chosen = type(current_platform).__name__
        raise RuntimeError(f"vLLM has chosen {chosen}: give --pack, made by scripts.gpu.pack")


def _configured(model: Path, engine_args: dict[str, Any], runner: str) -> Any:
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    arguments = engine_args | {"model": str(model)}
    if "kv_transfer_config" in engine_args:
        arguments["kv_transfer_config"] = KVTransferConfig(**engine_args["kv_transfer_config"])
    config = EngineArgs(**arguments).create_engine_config()
    if config.use_v2_model_runner != (runner == "2"):
        raise RuntimeError(f"vLLM would not take runner {runner}")
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if config.kv_transfer_config is not None:
        KVConnectorFactory.get_connector_class(config.kv_transfer_config)
    return config


def _built(config: Any, folder: Path) -> dict[str, dict[str, Any]]:
    """What each attention of the model keeps."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import (
        ensure_model_parallel_initialized,
        init_distributed_environment,
    )
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    with set_current_vllm_config(config), torch.inference_mode():
        init_distributed_environment(1, 0, f"file://{folder / 'rendezvous'}", 0, "gloo")
        ensure_model_parallel_initialized(1, 1, backend="gloo")
        with set_default_torch_dtype(config.model_config.dtype):
            initialize_model(vllm_config=config)
    layers = config.compilation_config.static_forward_context
    return {
        name: {
            "backend": layer.attn_backend.get_name(),
            "kept": str(layer.get_kv_cache_spec(config)),
        }
        for name, layer in layers.items()
        if hasattr(layer, "attn_backend")
    }


os.environ.update(ENVIRONMENT)
_pretend()
for module in MODULES:
    importlib.import_module(module)
