"""The EC connector against vLLM's interface, and its two sides driven by hand."""

from __future__ import annotations

import hashlib
import inspect
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

from s3kv.config import Config
from s3kv.connectors import S3ECConnector
from s3kv.connectors.ec_messages import ItemWorkerReport
from s3kv.connectors.ec_scheduler import ECSchedulerSide
from s3kv.connectors.ec_translate import (
    check_supported,
    embedding_width,
    is_cacheable,
    item_dtype,
    steps_inflight,
    wanted,
)
from s3kv.connectors.identity import encoder_fingerprint
from s3kv.connectors.plugin import register
from s3kv.connectors.requests import Adapters
from s3kv.errors import ConfigError, UnsupportedError
from s3kv.messages import ItemReport
from s3kv.objects.integrity import XXH3, Integrity
from s3kv.types import Outcome
from tests.planning.ec_desk import WIDTH

HASH = "ab" * 32
HOOKS = {
    "bind_connector_metadata": ("connector_metadata",),
    "start_load_caches": ("encoder_cache", "**kwargs"),
    "save_caches": ("encoder_cache", "mm_hash", "**kwargs"),
    "build_connector_worker_meta": (),
    "ensure_cache_available": ("request", "num_computed_tokens"),
    "has_cache_item": ("identifier",),
    "update_state_after_alloc": ("request", "index"),
    "build_connector_meta": ("scheduler_output",),
    "update_connector_output": ("connector_output",),
    "request_finished": ("request",),
    "shutdown": (),
}


def parameters(function: Any) -> tuple[str, ...]:
    found = list(inspect.signature(function).parameters.values())[1:]
    return tuple(("**" if p.kind is p.VAR_KEYWORD else "") + p.name for p in found)


@pytest.mark.parametrize("hook", HOOKS)
def test_vllm_calls_the_hooks_as_we_have_them(hook: str) -> None:
    assert parameters(getattr(ECConnectorBase, hook)) == HOOKS[hook]
    assert parameters(getattr(S3ECConnector, hook)) == HOOKS[hook]


def test_nothing_abstract_is_left_and_the_name_alone_is_enough() -> None:
    from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory

    assert not S3ECConnector.__abstractmethods__
    register()
    register()
    config = SimpleNamespace(ec_connector="S3ECConnector", ec_connector_module_path=None)
    assert ECConnectorFactory.get_connector_class(config) is S3ECConnector


# --- what can be served ----------------------------------------------------------------------


def vllm_config(**changes: Any) -> Any:
    tree: dict[str, Any] = {
        "model": "model",
        "revision": None,
        "dtype": torch.bfloat16,
        "quantization": None,
        "code_revision": None,
        "seed": 0,
        "model_impl": "auto",
        "disable_sliding_window": False,
        "is_encoder_decoder": False,
        "hf_config": SimpleNamespace(to_dict=lambda: {"hidden_size": WIDTH}),
        "hf_image_processor_config": {"size": 224},
        "get_inputs_embeds_size": lambda: WIDTH,
        "mm_processor_kwargs": None,
        "mm_processor_cache_gb": 4,
        "enable_prefix_caching": True,
        "tensor_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "enable_tower_connector_lora": None,
    } | changes
    multimodal = SimpleNamespace(**{k: v for k, v in tree.items() if k.startswith("mm_")})
    lora = tree["enable_tower_connector_lora"]
    return SimpleNamespace(
        model_config=SimpleNamespace(
            **tree, multimodal_config=None if tree.get("text_only") else multimodal
        ),
        cache_config=SimpleNamespace(enable_prefix_caching=tree["enable_prefix_caching"]),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=tree["tensor_parallel_size"],
            pipeline_parallel_size=1,
            prefill_context_parallel_size=tree["prefill_context_parallel_size"],
            data_parallel_rank=0,
        ),
        load_config=SimpleNamespace(load_format="dummy"),
        lora_config=None if lora is None else SimpleNamespace(enable_tower_connector_lora=lora),
        ec_transfer_config=SimpleNamespace(engine_id="engine", mm_encoder_output_widths={}),
        max_concurrent_batches=2,
    )


REFUSED: list[tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = [
    ({}, {"is_encoder_decoder": True}, UnsupportedError, "encoder-decoder"),
    ({}, {"text_only": True}, UnsupportedError, "no encoder"),
    ({}, {"prefill_context_parallel_size": 2}, UnsupportedError, "context_parallel"),
    ({"eviction": "s3fifo"}, {}, ConfigError, "'lru' or 'sieve'"),
    (
        {"trust_client_uuid": True},
        {"mm_processor_cache_gb": 0, "enable_prefix_caching": False},
        ConfigError,
        "numbers what clients do not name",
    ),
]


@pytest.mark.parametrize(("settings", "changes", "error", "says"), REFUSED)
def test_what_cannot_be_served_rightly_is_refused(
    settings: dict[str, Any], changes: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        check_supported(Config(bucket="bkt", **settings), vllm_config(**changes))
    check_supported(Config(bucket="bkt"), vllm_config())


def test_every_difference_that_matters_is_another_namespace() -> None:
    def fingerprint(integrity: Integrity = XXH3, **changes: Any) -> dict[str, Any]:
        return encoder_fingerprint(Config(bucket="bkt"), vllm_config(**changes), integrity)

    base = fingerprint()
    for change in (
        {"model": "other"},
        {"revision": "r1"},
        {"dtype": torch.float16},
        {"quantization": "fp8"},
        {"hf_config": SimpleNamespace(to_dict=lambda: {"hidden_size": 1})},
        {"hf_image_processor_config": {"size": 336}},
        {"mm_processor_kwargs": {"num_crops": 4}},
    ):
        assert fingerprint(**change) != base, change
    assert fingerprint(Integrity("none")) != base
    assert fingerprint(tensor_parallel_size=4) == base, "every rank has the whole output"


def test_numbers_are_read_from_where_vllm_has_them() -> None:
    assert item_dtype(vllm_config()) == "BF16"
    assert embedding_width(vllm_config()) == WIDTH
    assert steps_inflight(vllm_config()) == 3
    with pytest.raises(UnsupportedError, match="cannot be stored"):
        item_dtype(vllm_config(dtype=torch.complex64))


# --- items -----------------------------------------------------------------------------------


def feature(
    identifier: str = HASH, *, offset: int = 0, length: int = 100, modality: str = "image"
) -> MultiModalFeatureSpec:
    position = PlaceholderRange(offset=offset, length=length)
    name = identifier.rsplit(":", 1)[-1]
    return MultiModalFeatureSpec(None, modality, identifier, position, name)


@pytest.mark.parametrize(
    ("identifier", "modality", "believed"),
    [
        (HASH, "image", True),
        ("cd" * 64, "video", True),
        (f"adapter:{HASH}", "image", True),
        ("logo", "image", False),
        (HASH.upper(), "image", False),
        ("renderer0-mm-3-image-0", "image", False),
        (HASH, "prompt_embeds", False),
    ],
)
def test_only_what_looks_like_a_hash_of_content_is_believed(
    identifier: str, modality: str, believed: bool
) -> None:
    one = feature(identifier, modality=modality)
    assert is_cacheable(one, trust_client_uuid=False) is believed
    assert is_cacheable(one, trust_client_uuid=True) is (modality != "prompt_embeds")


def request(name: str, *features: MultiModalFeatureSpec, lora: Any = None) -> Any:
    return SimpleNamespace(request_id=name, mm_features=list(features), lora_request=lora)


def test_an_items_key_covers_its_size_and_the_towers_adapter(tmp_path: Path) -> None:
    def key(one: Any, adapters: Adapters | None = None) -> bytes:
        item = wanted(one, one.mm_features[0], adapters)
        assert item is not None
        return item.key.block_hash

    def adapter(number: int, content: bytes) -> Any:
        path = tmp_path / str(number)
        path.mkdir()
        (path / "adapter_model.safetensors").write_bytes(content)
        return SimpleNamespace(lora_name="a", lora_path=str(path), lora_int_id=number)

    plain = key(request("r", feature()))
    assert key(request("r", feature(length=99))) != plain
    assert key(request("r", feature(modality="video"))) != plain
    assert key(request("s", feature(offset=7))) == plain
    one = request("r", feature(), lora=adapter(1, b"weights"))
    same = request("r", feature(), lora=adapter(2, b"weights"))
    other = request("r", feature(), lora=adapter(3, b"retrained"))
    assert key(one) == plain, "an adapter of the language model alone"
    assert key(one, Adapters()) == key(same, Adapters()) != plain
    assert key(other, Adapters()) != key(one, Adapters())
    nowhere = SimpleNamespace(lora_name="a", lora_path=str(tmp_path / "no"), lora_int_id=4)
    assert wanted(request("r", feature(), lora=nowhere), feature(), Adapters()) is None


@pytest.mark.parametrize("identifier", [HASH, f"adapter:{HASH}", 'a "quoted\\ one', "naïve\n🖼"])
def test_an_items_key_is_the_hash_of_canonical_json(identifier: str) -> None:
    item = wanted(request("r"), feature(identifier, modality="vision_chunk"), None)
    assert item is not None
    said = {"identifier": identifier, "modality": "vision_chunk", "rows": 100, "adapter": ""}
    text = json.dumps(said, sort_keys=True, separators=(",", ":"))
    assert item.key.block_hash == hashlib.sha256(text.encode()).digest()


# --- the scheduler's side --------------------------------------------------------------------


@pytest.fixture
def side(monkeypatch: pytest.MonkeyPatch) -> ECSchedulerSide:
    """Without an I/O process: the test ends the fetches."""
    monkeypatch.setattr(ECSchedulerSide, "_start", lambda self: None)
    config = Config(bucket="bkt", host_bytes=2**22, recompute_gate=False)
    return ECSchedulerSide(config, vllm_config(), may_load=True, may_save=True)


def arrive(side: ECSchedulerSide) -> None:
    for order in side.planner.take_fetches():
        nbytes = 4096 + order.shape.rows * WIDTH * 2
        side.planner.ended(order.job_id, Outcome.OK, nbytes, 0.1, 0.0)


def output(tokens: int = 1, freed: tuple[str, ...] = ()) -> Any:
    return SimpleNamespace(total_num_scheduled_tokens=tokens, free_encoder_mm_hashes=list(freed))


def test_a_prefix_that_covers_the_image_needs_no_image(side: ECSchedulerSide) -> None:
    one = request("r", feature(offset=10, length=100))
    assert side.ensure(one, 110)
    assert side.planner.take_fetches() == []
    two = request("s", feature(offset=10, length=100))
    assert not side.ensure(two, 109), "the last token of it has yet to be computed"


def test_what_was_promised_is_loaded_even_if_everything_else_breaks(
    side: ECSchedulerSide, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one = request("r", feature())
    assert not side.ensure(one, 0)
    arrive(side)
    assert side.ensure(one, 0)
    assert side.has(HASH)

    def fail(*args: Any) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(side.planner, "allocated", fail)
    side.allocated(one, 0)
    assert side.broken == "_allocated"
    assert side.has(HASH), "what was said in this pass holds to its end"
    plan = side.plan(output())
    assert [load.identifier for load in plan.loads] == [HASH]
    assert not side.has(HASH)
    assert side.plan(output()).loads == ()
    assert side.ensure(request("s", feature("cd" * 32)), 0)
    side.on_finished(one)
    assert "without its cache" in caplog.text
    stats = side.stats()
    assert stats is not None
    assert stats.data["internal_errors"] == 1


def test_a_request_that_has_all_it_needs_costs_a_dictionary_read(side: ECSchedulerSide) -> None:
    one = request("r", feature())
    side.ensure(one, 0)
    arrive(side)
    assert side.ensure(one, 0)
    side.planner.ensure = None  # type: ignore[method-assign, assignment]
    assert side.ensure(one, 0)
    assert side.broken is None


class Client:
    """Writes down what it is told, in the order of the I/O client's calls."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def fetch(self, job_id: int, *rest: Any) -> None:
        self.told.append(f"fetch {job_id}")

    def cancel(self, job_id: int) -> None:
        self.told.append(f"cancel {job_id}")

    def flush(self) -> None:
        self.told.append("flush")

    def poll(self, linger_s: float) -> list[Any]:
        self.told.append("poll")
        return []

    def take(self) -> list[str]:
        told, self.told = self.told, []
        return told


def test_a_pass_speaks_to_the_io_process_once(side: ECSchedulerSide) -> None:
    """However many requests ask, and not at all while they only wait for what was asked."""
    side._client = client = Client()  # type: ignore[assignment]
    side._polled_s = time.monotonic()
    requests = [request(f"r{n}", feature(f"{n:064x}")) for n in range(3)]
    for one in requests:
        assert not side.ensure(one, 0)
    assert client.take() == [], "nothing was under way, so there was nothing to hear"
    side.plan(output())
    assert client.take() == ["fetch 1", "fetch 2", "fetch 3", "flush"]
    for one in requests:
        assert not side.ensure(one, 0)
    side.plan(output())
    assert client.take() == ["poll", "flush"]
    side.on_finished(requests[1])
    assert client.take() == ["cancel 2", "flush"], "there may be no further pass"


def test_a_prefix_that_is_gone_while_the_request_waits_is_noticed(side: ECSchedulerSide) -> None:
    """Then it needs an item it did not need in the pass before."""
    one = request("r", feature(HASH, offset=0), feature("cd" * 32, offset=200))
    assert not side.ensure(one, 150)
    assert len(side.planner.take_fetches()) == 1
    assert not side.ensure(one, 0)
    assert len(side.planner.take_fetches()) == 1


def test_workers_reports_reach_the_statistics(side: ECSchedulerSide) -> None:
    side.stats()
    seconds = {"upload_seconds": [0.1, 0.2]}
    counted = {"encoded": 2, "upload_ok": 2, "io_requests|PUT|2xx": 2, "saves_dropped": 1}
    report = ItemReport(counted, encoded_rows=64, seconds=seconds)
    other = ItemReport({"encoded": 1}, seconds={"upload_seconds": [0.3]})
    mine = ItemWorkerReport(report).aggregate(ItemWorkerReport(other))
    side.on_output(SimpleNamespace(ec_connector_worker_meta=mine))  # type: ignore[arg-type]
    side.on_output(SimpleNamespace())  # type: ignore[arg-type]
    stats = side.stats()
    assert stats is not None
    told = {"encoded": 3, "upload_ok": 2, "io_requests|PUT|2xx": 2, "saves_dropped|memory_full": 1}
    assert stats.data == told | {"upload_seconds": [0.1, 0.2, 0.3]}
    assert side.stats() is None
