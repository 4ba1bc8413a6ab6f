"""The engine of `scripts.gpu.engine` without a GPU: configured, its model built, and run once.

vLLM takes this machine for one with a GPU, as far as it asks NVML and Triton. The model computes on
the CPU by the functions in torch that the GPU will run. Attention is left out: its kernels are
Triton's. Raises what vLLM raises, such as AttributeError for a kernel that `compiled.py` lacks.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

RUNNERS = {"1": "vllm.v1.worker.gpu_model_runner", "2": "vllm.v1.worker.gpu.model_runner"}
MODULES = (
    *("lab.child", "lab.audit", "lab.on_cpu", "s3kv.connectors", "vllm.v1.worker.gpu_worker"),
    "vllm.model_executor.kernels.linear.cute_dsl.ll_bf16",
)
WITH_TORCHVISION = "vllm.model_executor.warmup.minimax_m3_msa_warmup"
"""What a worker on CUDA imports when it warms up. Where it could not, the result says so."""
TOKENS = 8

ON_THE_WAY = (
    "vllm.v1.attention.backends.triton_attn",
    "vllm.v1.attention.ops.triton",
    *("vllm.v1.core.", "vllm.v1.engine.", "vllm.v1.executor.", "vllm.v1.sample."),
    *("vllm.v1.worker.", "vllm.utils."),
)
"""How the names of modules begin that run between a request and its tokens, beside the layers."""
KERNEL = re.compile(r"torch\.ops\.(_C\w*|_moe_C\w*)\.(\w+)")
FOR_OTHERS = {
    "fused_gumbel_argmax": "samples on a CPU",
    "get_xpu_view_from_cpu_tensor": "for Intel's GPUs",
    "greedy_argmax": "samples on a CPU",
    "weak_ref_tensor": "for CUDA graphs",
}
"""Compiled kernels that those modules name and an eager engine on CUDA does not run."""


def rehearse(model: Path, engine_args: dict[str, Any], runner: str, folder: Path) -> dict[str, Any]:
    """What was found. folder: an empty one, for files that last as long as this."""
    _pretend()
    for module in (*MODULES, RUNNERS[runner]):
        importlib.import_module(module)
    torchvision = importlib.util.find_spec("torchvision") is not None
    if torchvision:
        importlib.import_module(WITH_TORCHVISION)
    config = _configured(model, engine_args, runner)
    layers, specs = _run_once(config, folder)
    compiled = [name for name, function in layers.items() if function != "forward_native"]
    if compiled:
        raise RuntimeError(f"would run compiled kernels: {', '.join(compiled)}")
    missing = _missing_kernels()
    if missing:
        raise RuntimeError(f"may need compiled kernels that are missing: {missing}")
    from vllm.v1.sample.ops.topk_topp_sampler import flashinfer_sampler_supported

    if flashinfer_sampler_supported():
        raise RuntimeError("would sample with FlashInfer")
    backends = {spec["backend"] for spec in specs.values()}
    if backends != {"TRITON_ATTN"}:
        raise RuntimeError(f"would run attention of {backends}")
    return {"layers": layers, "kv": specs, "torchvision": torchvision}


def _missing_kernels() -> dict[str, str]:
    """Those that an imported module on the way names, by name, and the module."""
    found = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) if name.startswith(ON_THE_WAY) else None
        for namespace, kernel in KERNEL.findall(Path(file).read_text()) if file else ():
            stands_in = hasattr(getattr(torch.ops, namespace), kernel)
            if not stands_in and kernel not in FOR_OTHERS:
                found[f"{namespace}.{kernel}"] = name
    return found


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
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        chosen = type(current_platform).__name__
        raise RuntimeError(f"vLLM has chosen {chosen}: give --pack, made by scripts.gpu.pack")
    # vLLM's own operators, attention among them, are registered for the tensors of this rehearsal.
    type(current_platform).dispatch_key = "CPU"


def _configured(model: Path, engine_args: dict[str, Any], runner: str) -> Any:
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    connector = KVTransferConfig(**engine_args["kv_transfer_config"])
    arguments = engine_args | {"model": str(model), "kv_transfer_config": connector}
    config = EngineArgs(**arguments).create_engine_config()
    if config.use_v2_model_runner != (runner == "2"):
        raise RuntimeError(f"vLLM would not take runner {runner}")
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    KVConnectorFactory.get_connector_class(connector)
    return config


def _run_once(config: Any, folder: Path) -> tuple[dict[str, str], dict[str, dict[str, Any]]]:
    """How each layer computes that may have a compiled kernel, and what each attention keeps."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import (
        ensure_model_parallel_initialized,
        init_distributed_environment,
    )
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.custom_op import CustomOp
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    with set_current_vllm_config(config), torch.inference_mode():
        init_distributed_environment(1, 0, f"file://{folder / 'rendezvous'}", 0, "gloo")
        ensure_model_parallel_initialized(1, 1, backend="gloo")
        with set_default_torch_dtype(config.model_config.dtype):
            model = initialize_model(vllm_config=config)
        numbers = torch.arange(TOKENS)
        with set_forward_context(None, config, num_tokens=TOKENS):
            logits = model.compute_logits(model(numbers, numbers))
    if logits.shape != (TOKENS, config.model_config.get_vocab_size()):
        raise RuntimeError(f"the model gave {tuple(logits.shape)}")
    layers = {
        name: layer._forward_method.__name__
        for name, layer in model.named_modules()
        if isinstance(layer, CustomOp)
    }
    attention = config.compilation_config.static_forward_context
    specs = {
        name: {
            "backend": layer.attn_backend.get_name(),
            "kept": str(layer.get_kv_cache_spec(config)),
        }
        for name, layer in attention.items()
    }
    return layers, specs
