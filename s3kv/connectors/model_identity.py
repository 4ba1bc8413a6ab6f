"""Identity of a model: its name, weights, configuration, code and processor.

The identity of a model in a local folder includes the content of its files, so a replaced file
makes it another model. The identity of a model from a hub includes the downloaded commit.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from s3kv.connectors.weights import weights_digest

if TYPE_CHECKING:
    from vllm.config import LoadConfig, ModelConfig

logger = logging.getLogger("s3kv")
T = TypeVar("T")

_FILE_SUFFIXES = (".json", ".py", ".yaml", ".yml")
"""Suffixes of the files beside the weights that vLLM, transformers or the model's code read."""
_NOT_READ = frozenset(
    {
        "config.json",  # included in the form in which vLLM has read it
        # These map text to tokens and back. Block hashes are made from tokens.
        "tokenizer.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "tekken.json",
        "chat_template.json",
        # This sets how tokens are sampled.
        "generation_config.json",
    }
)
_PROCESSOR_CHOICE = "tokenizer_config.json"
"""The file that may name the class of a multi-modal model's processor."""
_WHOLE_FILE_MAX_BYTES = 2**26
_LIBRARIES = ("transformers", "torchvision", "mistral_common")
"""Libraries that process images, audio and video. transformers chooses a processor class by its own
version, the model's files, and whether torchvision is installed."""
_VOLATILE = frozenset(
    {"_name_or_path", "name_or_path", "transformers_version", "id2label", "label2id"}
)
"""Fields of a model's configuration that do not count: origin, writing library, class names."""
_SPELLED_MAX_BYTES = 2**17
_LOAD = ("load_format", "ignore_patterns")
_LOADER_SOURCE = ("tensorizer_uri", "tensorizer_dir", "pattern")
"""Loader options that select the files to read. The others are for speed, or are credentials."""


def model_identity(
    model: ModelConfig, load: LoadConfig, name: str, weights: str | None
) -> dict[str, Any]:
    """The identity as plain JSON values. weights: result of `local_weights`."""
    return {
        "name": name,
        # The downloaded commit, even if a branch such as "main" was requested.
        "commit": getattr(model.hf_config, "_commit_hash", None),
        "code_revision": model.code_revision,
        "remote_code": getattr(model, "trust_remote_code", None),
        "weights": weights,
        "files": local_files(model),
        "load": {**(fields(load, _LOAD) or {}), "source": _loader_source(load)},
        "dummy_seed": model.seed if is_dummy(load) else None,
        "config": spelled(model.hf_config.to_dict()),
        "implementation": str(model.model_impl),
        "class_overrides": plain(getattr(model, "model_class_overrides", None)),
        # Generation or embedding, which may change what a token attends to.
        "runner": getattr(model, "runner_type", None),
        "convert": getattr(model, "convert_type", None),
        "dtype": str(model.dtype),
        "quantization": model.quantization,
        "quantization_config": plain(getattr(model, "quantization_config", None)),
        "disable_sliding_window": model.disable_sliding_window,
        "max_model_len": _by_length(model),
    }


def _by_length(model: ModelConfig) -> list[Any] | int | None:
    """The part of the identity that depends on `max_model_len`: some position embeddings, and the
    scale of Llama 4's queries, unless the generation config turns that on or off."""
    text = json.dumps(model.hf_config.to_dict(), default=str)
    if "llama4" in text:
        found = _or_warn(model.model, model.try_get_generation_config)
        found = {"attn_temperature_tuning": "unread"} if found is None else found
        found = found | (model.override_generation_config or {})
        return [model.max_model_len, found.get("attn_temperature_tuning")]
    return model.max_model_len if "longrope" in text or 'type": "dynamic"' in text else None


def processor_identity(model: ModelConfig) -> dict[str, Any] | None:
    """Identity of the code and settings that turn images, video and audio into the encoder's input.
    None for a model without media, unless transformers' own code runs it: then the library versions
    also count."""
    sees = model.multimodal_config is not None
    by_transformers = getattr(model, "using_transformers_backend", None)
    if not sees and not (by_transformers and by_transformers()):
        return None
    return {
        "image": plain(getattr(model, "hf_image_processor_config", None)),
        "libraries": {name: _version(name) for name in _LIBRARIES},
    }


def is_dummy(load: LoadConfig) -> bool:
    """Whether the weights are drawn from a seed instead of read."""
    return str(load.load_format) == "dummy"


def weights_path(model: ModelConfig) -> str:
    """The source of the weights for vLLM: a local path, a URL, or a name on a hub."""
    return getattr(model, "model_weights", "") or model.model


def local_weights(model: ModelConfig, load: LoadConfig, method: str) -> str | None:
    """Digest of the weights; None if they are random, not in local files, or not readable (which is
    logged). method: the setting `weights_digest`."""
    path = weights_path(model)
    return None if is_dummy(load) else _or_warn(path, lambda: weights_digest(path, method))


def local_files(model: ModelConfig) -> dict[str, str] | None:
    """Digests of the files beside the weights, by name; None without a readable local folder.
    Files that cannot change what the model computes from given tokens and images are left out."""
    folder = Path(model.model)
    if not folder.is_dir():
        return None
    ignored = _NOT_READ if model.multimodal_config else _NOT_READ | {_PROCESSOR_CHOICE}

    return _or_warn(
        model.model,
        lambda: {
            path.name: _file_digest(path)
            for path in sorted(folder.iterdir())
            if path.suffix in _FILE_SUFFIXES and path.name not in ignored and path.is_file()
        },
    )


def file_digest(path: str | None) -> str | None:
    """Digest of the file at `path`; None for no path or an unreadable file."""
    return None if path is None else _or_warn(path, lambda: _file_digest(Path(path)))


def _loader_source(load: LoadConfig) -> str | None:
    """Digest of the loader's source: a URL may hold credentials, and the manifest is plain text."""
    options = plain(getattr(load, "model_loader_extra_config", None)) or {}
    options = options.get("tensorizer_config") or options
    named = {name: options[name] for name in _LOADER_SOURCE if options.get(name)}
    return digest_of(named) if named else None


def _file_digest(path: Path) -> str:
    if path.stat().st_size > _WHOLE_FILE_MAX_BYTES:
        return weights_digest(str(path)) or ""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:32]


def _or_warn(path: str, read: Callable[[], T]) -> T | None:
    try:
        return read()
    except (OSError, ValueError) as error:
        logger.warning(
            "s3kv cannot read the model's files in %s (%s): set another model_id whenever they "
            "change",
            path,
            error,
        )
        return None


def _version(library: str) -> str | None:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None


def fields(settings: Any, names: Iterable[str]) -> dict[str, Any] | None:
    """The named attributes of a configuration object; None for no object. An attribute that is
    missing in this version of vLLM is None."""
    if settings is None:
        return None
    return {name: plain(getattr(settings, name, None)) for name in names}


def spelled(tree: Mapping[str, Any]) -> Any:
    """A model's configuration field by field, so that a message can name a difference; its digest
    if it is too long for a message."""
    value = plain({k: v for k, v in tree.items() if k not in _VOLATILE})
    return value if len(_text(value)) <= _SPELLED_MAX_BYTES else digest_of(value)


def digest_of(value: Any) -> str:
    """SHA-256 digest of a value that may be long or secret. value: as `plain` returns it."""
    return hashlib.sha256(_text(value)).hexdigest()


def plain(value: Any) -> Any:
    """`value` as JSON values. Other types become their text, or the name of their type if the text
    contains a memory address, which differs between processes."""
    if isinstance(value, Mapping):
        items = sorted(value.items(), key=lambda item: str(item[0]))
        return {str(key): plain(item) for key, item in items}
    if isinstance(value, set | frozenset):
        return sorted((plain(item) for item in value), key=str)
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    text = str(value)
    return text if " at 0x" not in text else f"a {type(value).__qualname__}"


def _text(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()
