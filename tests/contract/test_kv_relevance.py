"""Of everything that can be set in vLLM, lie in a model's folder or come with a request it is known
whether it changes the bytes of a chunk or what they mean; and what is known is what the fingerprint
does, and what the hashes of a request do.

A field that a new version of vLLM has and the tables do not is a failure here. To mend it, find out
what the field does, and give it a row.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from vllm import PoolingParams, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import PlaceholderRange
from vllm.sampling_params import StructuredOutputsParams

from s3kv.connectors import identity
from tests.contract import test_identity
from tests.contract.fingerprints import Engine, drafts, leaves, sees
from tests.contract.hashed_requests import BLOCK_TOKENS, TOKENS, arriving, hashed, hashing, rows
from tests.contract.kv_relevance import (
    BLOCK_HASH,
    DERIVED,
    FINGERPRINT,
    NO,
    NOT_CACHED,
    Row,
    table,
    wrong,
)
from tests.contract.pictures import kwargs_item, picture
from tests.project import plant

PACKAGE = Path(vllm.__file__).parent
VERSION = ".".join(vllm.__version__.split(".")[:2])
CONFIG = [row for row in table("config") if row.in_version(VERSION)]
ENVIRONMENT = [row for row in table("environment") if row.in_version(VERSION)]
REQUESTS = [row for row in table("requests") if row.in_version(VERSION)]
FILES = table("files")
HELD = (
    "Model Cache Parallel Scheduler Attention Kernel Compilation Device Load LoRA Speculative "
    "Diffusion"
)
"""The configurations that are in vLLM's whole one, each under its own name."""
NOT_AS_IT_STANDS = {"model.runner", "model.convert", "model.max_model_len"}
"""Places that bear a field's name: vLLM resolves the first two, the last matters to some models."""
OTHER_VALUES: dict[str, Any] = {
    "EngineCoreRequest.prompt_token_ids": [5] * TOKENS,
    "EngineCoreRequest.prompt_embeds": rows(2),
    # The first id is 0, as which vLLM hashes an embedding.
    "EngineCoreRequest.prompt_is_token_ids": [0 < position < 40 for position in range(TOKENS)],
    "EngineCoreRequest.mm_features": [],
    "EngineCoreRequest.lora_request": LoRARequest("b", 1, "/a"),
    "EngineCoreRequest.sampling_params": SamplingParams(max_tokens=9),
    "EngineCoreRequest.pooling_params": PoolingParams(task="classify"),
    "MultiModalFeatureSpec.data": kwargs_item(pixel_values=torch.ones(3, 32, 32)),
    "MultiModalFeatureSpec.mm_position": PlaceholderRange(0, 90),
    "PlaceholderRange.offset": 3,
    "PlaceholderRange.length": 90,
    "PlaceholderRange.is_embed": torch.arange(100) < 50,
    "SamplingParams.structured_outputs": StructuredOutputsParams(regex="a"),
    "SamplingParams.extra_args": {"another": 1},
    "PoolingParams.extra_kwargs": {"compressed_token_type_ids": 8},
}
"""Of fields of a request that cannot be just anything else."""


@pytest.fixture
def engine(engine: Engine) -> Engine:
    """One that has everything a fingerprint looks at: images, adapters, a draft, diffusion."""
    sees()(engine)
    drafts(engine)
    for name in ("lora_config", "diffusion_config"):
        engine.set(engine.vllm, **{name: SimpleNamespace()})
    return engine


def holder_of(engine: Engine, row: Row) -> Any:
    others = {"VllmConfig": engine.vllm, "MultiModalConfig": engine.model.multimodal_config}
    name = row.group.removesuffix("Config")
    held = row.group.endswith("Config") and name in HELD.split()
    return getattr(engine.vllm, f"{name.lower()}_config") if held else others.get(row.group)


def stands_under_its_own_name(row: Row) -> bool:
    return row.at.endswith(f".{row.name}") and row.at not in NOT_AS_IT_STANDS


def test_every_field_and_variable_of_this_vllm_has_a_row() -> None:
    assert wrong(PACKAGE, VERSION) == []


def test_a_field_that_is_new_is_noticed(tmp_path: Path) -> None:
    """The control, on sources of its own."""
    sources = {
        "config/cache.py": "class CacheConfig:\n    new_format: str = 'a'\n",
        "envs.py": "environment_variables: dict = {'VLLM_NEW': 1}\n",
        "v1/kv_cache_interface.py": "class MambaSpec:\n    scale: int\n",
        "lora/request.py": "class LoRARequest:\n    scale: float = 1.0\n"
        "    def __init__(self) -> None:\n        self.rank, self.kind = 8, 'a'\n",
    }
    plant(tmp_path, sources)
    found = wrong(tmp_path, VERSION)
    for field in ("scale", "rank", "kind"):
        assert f"requests.toml: LoRARequest.{field} has no row" in found
    assert f"requests.toml: Request.prompt_embeds is not in vLLM {VERSION}" in found
    assert "cache.toml: MambaSpec.scale has no row" in found
    assert "config.toml: CacheConfig.new_format has no row" in found
    assert "environment.toml: VLLM_NEW has no row" in found
    assert f"config.toml: CacheConfig.cache_dtype is not in vLLM {VERSION}" in found


def test_every_place_that_a_row_names_is_there_and_is_tried(engine: Engine) -> None:
    """Tried: the next test changes it, or test_identity.py, and gets another namespace."""
    tried = {c[0] for c in test_identity.CHANGES} | {c[0] for c in test_identity.TOGETHER}
    tried |= {row.at for row in CONFIG if stands_under_its_own_name(row)} | {"environment"}
    there = set(leaves(engine.fingerprint())) | set(engine.fingerprint())
    for row in CONFIG + ENVIRONMENT + FILES:
        if row.where == FINGERPRINT and row.at:
            assert row.at in there, row
            assert row.at in tried or row.at in {place.partition(".")[0] for place in tried}, row


def test_a_setting_is_in_the_fingerprint_where_its_row_says_so(engine: Engine) -> None:
    """Those under their own name, also a tier's; the others are in test_identity.py."""
    count = 0
    before, tiers = leaves(engine.fingerprint()), engine.offload_fingerprint()
    for row in CONFIG:
        holder = holder_of(engine, row)
        if stands_under_its_own_name(row):
            engine.set(holder, **{row.name: "another"})
            after = leaves(engine.fingerprint())
            assert after[row.at] != before[row.at], row
            assert engine.offload_fingerprint() != tiers, row
            before, tiers = after, engine.offload_fingerprint()
            count += 1
    assert count > 30


@pytest.mark.long
def test_a_setting_is_not_in_the_fingerprint_where_its_row_says_so(engine: Engine) -> None:
    """What is in it without need keeps engines apart that could share."""
    count = 0
    before = engine.fingerprint()
    for row in CONFIG:
        holder = holder_of(engine, row)
        has_rows = row.name.endswith("_config")
        if row.where in (BLOCK_HASH, NO) and holder is not None and not has_rows:
            engine.set(holder, **{row.name: "another"})
            assert engine.fingerprint() == before, row
            count += 1
    assert count > 200


@pytest.mark.long
def test_variables_are_in_the_fingerprint_where_their_rows_say_so(engine: Engine) -> None:
    named = set()
    before = engine.fingerprint()
    for row in ENVIRONMENT:
        engine.patch.setenv(row.name, "2")
        if row.at == "environment":
            assert engine.fingerprint()["environment"][row.name] == "2", row
            named.add(row.name)
        elif row.where == NO:
            assert engine.fingerprint() == before, row
        engine.patch.delenv(row.name)
    every_version = {row.name for row in table("environment") if row.at == "environment"}
    assert named <= set(identity.ENVIRONMENT) == every_version


def test_files_are_in_the_fingerprint_where_their_rows_say_so(engine: Engine) -> None:
    for number, row in enumerate(FILES):
        name = row.name.replace("*", f"x{number}")
        first = next(r for r in FILES if fnmatch.fnmatch(name, r.name))
        assert first == row, f"{name} is {first.name}"
        if row.at == "model.config":  # which vLLM has read before
            continue
        (engine.folder / name).write_text("1")
        before = leaves(engine.fingerprint())
        (engine.folder / name).write_text("2")
        after = leaves(engine.fingerprint())
        if row.where == FINGERPRINT:
            assert after[row.at] != before[row.at], row
        else:
            assert after == before, row
        (engine.folder / name).unlink()


def hashes_with(row: Row | None) -> list[bytes]:
    """Hashes of a request that has everything, with another value of the row's field."""
    group = "" if row is None else row.group
    parts: dict[str, Any] = {
        "PlaceholderRange": PlaceholderRange(0, 100),
        "MultiModalFeatureSpec": picture("a"),
        "LoRARequest": LoRARequest("a", 1, "/a"),
        "SamplingParams": SamplingParams(max_tokens=8),
        "PoolingParams": PoolingParams(task="classify"),
    }
    if row is not None and group in parts:
        if dataclasses.is_dataclass(parts[group]):
            parts[group] = dataclasses.replace(parts[group], **{row.name: other_value(row)})
        else:
            setattr(parts[group], row.name, other_value(row))
    if group != "MultiModalFeatureSpec":
        parts["MultiModalFeatureSpec"].mm_position = parts["PlaceholderRange"]
    whole = {
        "prompt_embeds": rows(),
        "prompt_is_token_ids": [position < 40 for position in range(TOKENS)],
        "mm_features": [parts["MultiModalFeatureSpec"]],
        "lora_request": parts["LoRARequest"],
        "sampling_params": parts["SamplingParams"],
        "cache_salt": "a",
    }
    if group == "PoolingParams":
        whole |= {"sampling_params": None, "pooling_params": parts[group]}
    if row is not None and group == "EngineCoreRequest":
        whole[row.name] = other_value(row)
    return list(hashing().of(hashed(arriving(**whole)), b"digest of the adapter"))


def other_value(row: Row) -> Any:
    return OTHER_VALUES.get(f"{row.group}.{row.name}", "another")


def test_a_field_of_a_request_is_in_its_hashes_where_its_row_says_so() -> None:
    """Of those that a client gives. How adapters are read is in test_adapter_loads.py."""
    before = hashes_with(None)
    assert len(before) == TOKENS // BLOCK_TOKENS
    counts = dict.fromkeys((BLOCK_HASH, DERIVED, NO), 0)
    for row in REQUESTS:
        given = row.group in {name.partition(".")[0] for name in OTHER_VALUES} | {"LoRARequest"}
        if not given or row.where == NOT_CACHED or row.name == "is_3d_lora_weight":
            continue
        counts[row.where] += 1
        after = hashes_with(row)
        if row.where == NO:
            assert after == before, row
        else:
            assert len(after) == len(before), row
            assert not set(after) & set(before), row
    assert counts[BLOCK_HASH] > 5
    assert counts[DERIVED] > 5
    assert counts[NO] > 50
