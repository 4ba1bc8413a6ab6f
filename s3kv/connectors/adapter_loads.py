"""Record of the adapters (LoRA) that this worker process has loaded, and its reports of them.

Only the process that loads an adapter can know its content: files may change before or after the
load. vLLM has no hook for a load. So this module wraps the one function that reads an adapter,
`WorkerLoRAManager._load_adapter`, and digests the files before and after the load. If the two
digests are equal, this content was loaded.

It runs in the worker process, on the thread that runs the model.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import pickle
import weakref
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from s3kv.connectors.weights import Digest, adapter_digest

if TYPE_CHECKING:
    from vllm.config import LoRAConfig
    from vllm.lora.request import LoRARequest

logger = logging.getLogger("s3kv")

_observers: weakref.WeakSet[AdapterLoads] = weakref.WeakSet()
# Every rank sends a report in every step, and most are alike.
_pack, _unpack = functools.lru_cache(1)(pickle.dumps), functools.lru_cache(1)(pickle.loads)


class AdapterStep(NamedTuple):
    """A step's number. reported: the number of the last step whose adapter report the scheduler had
    received when it planned this one."""

    number: int
    reported: int


NO_STEP = AdapterStep(0, 0)
"""The time before the first step."""


class LoadedAdapter(NamedTuple):
    """An adapter as it was loaded. name: the part that vLLM hashes. digest: that of its files."""

    name: str
    digest: bytes


@dataclass(slots=True)
class AdapterReport:
    """The adapters that one or more ranks have loaded after the step `number`, by vLLM's adapter
    number. It contains only adapters whose content is the same on all these ranks."""

    number: int
    by_id: dict[int, LoadedAdapter] = field(default_factory=dict)

    def __getstate__(self) -> tuple[int, bytes]:
        return self.number, _pack(tuple(sorted(self.by_id.items())))

    def __setstate__(self, state: tuple[int, bytes]) -> None:
        self.number, self.by_id = state[0], dict(_unpack(state[1]))

    def merge(self, other: AdapterReport) -> None:
        self.number = min(self.number, other.number)
        self.by_id = {number: a for number, a in self.by_id.items() if other.by_id.get(number) == a}


def hashed_name(adapter: LoRARequest) -> str:
    """The part of an adapter that vLLM hashes: its name and path.

    Requests with the same hashed name share blocks in vLLM's own prefix cache.
    """
    from vllm.v1.core.kv_cache_utils import _gen_lora_extra_hash_keys

    request: Any = SimpleNamespace(lora_request=adapter)
    return repr(_gen_lora_extra_hash_keys(request))


class AdapterLoads:
    """The adapters that one engine has loaded on this rank.

    lora_config: the engine's own object. It distinguishes this engine's loads from those of another
        engine in the same process. method: the digest method, as for weights.
    """

    def __init__(self, lora_config: LoRAConfig, method: str) -> None:
        self._lora_config, self._method = lora_config, method
        self._manager: Any = None
        self._by_id: dict[int, tuple[str, LoadedAdapter]] = {}
        self._contents: dict[str, bytes | None] = {}
        """Digest by the name under which vLLM shares KV; None if loads differ or are unknown."""
        self._step = NO_STEP
        self._has_changed = False
        """Whether the content of a name has changed since the last report."""
        self._change_step = 0
        """The last step whose report included such a change."""
        if not _wrap():
            logger.warning(
                "s3kv does not cache requests with adapters (LoRA): this version of vLLM loads "
                "them in a way that s3kv does not know"
            )
        _observers.add(self)

    def begin(self, step: AdapterStep) -> None:
        self._step = step

    @property
    def may_save(self) -> bool:
        """Whether the scheduler has a report of every name whose content has changed. Until then,
        the saves that it plans would get the hashes of the previous content."""
        return not self._has_changed and self._step.reported >= self._change_step

    def report(self) -> AdapterReport:
        """The adapters loaded now whose content is certain. Called once per step, at its end."""
        if self._has_changed:
            self._has_changed, self._change_step = False, self._step.number
        loaded = () if self._manager is None else self._manager.list_adapters()
        known = {number: self._by_id[number] for number in loaded if number in self._by_id}
        certain = {n: a for n, (key, a) in known.items() if self._contents[key] == a.digest}
        return AdapterReport(self._step.number, certain)

    def serves(self, manager: Any) -> bool:
        return getattr(manager, "lora_config", None) is self._lora_config

    def digest_now(self, adapter: LoRARequest) -> Digest | str:
        """The digest of the adapter's files now, or the reason why there is none. Never raises."""
        if getattr(adapter, "tensorizer_config_dict", None) is not None:
            return "tensorizer loads it"
        # vLLM resolves a path like this. It downloads an adapter that is not on this machine; the
        # place of that download is unknown here.
        path = os.path.abspath(os.path.expanduser(adapter.lora_path))
        try:
            digest = adapter_digest(path, self._method)
        except OSError as error:
            return f"its files cannot be read ({error})"
        return f"{path} is not a directory with files" if digest is None else digest

    def loaded(self, manager: Any, adapter: LoRARequest, model: Any, before: Digest | str) -> None:
        """Record the content of `model`, which vLLM has just loaded, if it can be known.

        before: the result of `digest_now` before the load.
        """
        try:
            _detach(model)
        except (AttributeError, TypeError, RuntimeError) as error:
            before = f"its tensors may still be those of its files ({error})"
        after = self.digest_now(adapter) if isinstance(before, Digest) else before
        if isinstance(after, Digest) and after != before:
            after = f"its files in {adapter.lora_path} changed while they were loaded"
        if manager is not self._manager:
            self._manager = manager
            self._by_id.clear()
        self._note(adapter, after)

    def _note(self, adapter: LoRARequest, content: Digest | str) -> None:
        """Record the digest of a load, or the reason why it is unknown. That is logged once for a
        name, which is never cached again: vLLM may load an adapter for every request."""
        name = hashed_name(adapter)
        digest: bytes | None = None
        # vLLM shares the outputs of an adapted encoder under the adapter's bare name.
        adapts_towers = getattr(self._lora_config, "enable_tower_connector_lora", False)
        shared = adapter.lora_name if adapts_towers else name
        if isinstance(content, Digest):  # of the files, and of the way vLLM reads them
            fused = getattr(adapter, "is_3d_lora_weight", False)
            digest = bytes.fromhex(content.hexadecimal) + (b"3d" if fused else b"")
        elif self._contents.get(shared, content) is not None:
            logger.warning(
                "s3kv does not cache requests with the adapter %r: %s", adapter.lora_name, content
            )
        replaced = self._by_id.pop(adapter.lora_int_id, None)
        if replaced is not None and replaced[1].digest != digest:
            # Requests of the replaced adapter that still run now use the new one.
            self._spoil(replaced[0], adapter)
        if self._contents.setdefault(shared, digest) != digest:
            self._spoil(shared, adapter)
        if digest is not None:
            self._by_id[adapter.lora_int_id] = shared, LoadedAdapter(name, digest)

    def _spoil(self, shared: str, adapter: LoRARequest) -> None:
        if self._contents[shared] is None:
            return
        self._contents[shared] = None
        self._has_changed = True
        logger.warning(
            "s3kv no longer caches requests with the adapter %s: %r was loaded after it from %s, "
            "with other content, so vLLM's own cache may mix KV of both. Load changed weights "
            "under a new name",
            shared,
            adapter.lora_name,
            adapter.lora_path,
        )


def _detach(model: Any) -> None:
    """Give the loaded adapter memory of its own.

    Tensors that vLLM does not pin are mappings of the file. A write to the file changes them until
    vLLM copies them to the model, which may be any number of steps later.
    """
    for layer in (*model.loras.values(), *getattr(model, "modules_to_save", {}).values()):
        for name, tensor in vars(layer).items():
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                if not tensor.is_pinned():
                    setattr(layer, name, tensor.clone())
            elif isinstance(tensor, list | tuple) and any(
                isinstance(part, torch.Tensor) for part in tensor
            ):
                raise TypeError(f"{name} is a list of tensors")


def _wrap() -> bool:
    """Wrap vLLM's load function, so that every load in this process is observed. Returns False if
    this vLLM does not have the function in the expected form."""
    try:
        from vllm.lora.worker_manager import WorkerLoRAManager

        load: Any = WorkerLoRAManager._load_adapter
    except (ImportError, AttributeError):
        return False
    if hasattr(load, "observed_by_s3kv"):
        return True
    is_known = list(inspect.signature(load).parameters) == ["self", "lora_request"]
    if not is_known or not hasattr(WorkerLoRAManager, "list_adapters"):
        return False

    @functools.wraps(load)
    def observed(self: Any, lora_request: LoRARequest) -> Any:
        loads = next((o for o in _observers if o.serves(self)), None)
        if loads is None:
            return load(self, lora_request)
        before = loads.digest_now(lora_request)
        model = load(self, lora_request)
        loads.loaded(self, lora_request, model, before)
        return model

    observed.observed_by_s3kv = True  # type: ignore[attr-defined]
    WorkerLoRAManager._load_adapter = observed
    return True
