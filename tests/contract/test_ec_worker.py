"""The worker's side of the EC connector, driven by hand."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.distributed.parallel_state as parallel_state

from s3kv.config import Config
from s3kv.connectors import ec_worker
from s3kv.connectors.ec_translate import worker_rendezvous
from s3kv.connectors.ec_worker import ECWorkerSide
from s3kv.errors import ConfigError
from s3kv.host.slab import Slab
from s3kv.io.slab_handover import offer_slab
from s3kv.messages import ItemLoad, ItemPlan, ItemReport, ItemSave
from s3kv.objects.item_format import HEADER_BYTES, object_bytes
from s3kv.types import ChunkKey, ItemShape, Span

KEY = ChunkKey(0, b"k" * 32)
ROWS, WIDTH = 10, 16


class Outbox:
    """Takes what is sent and says it is in the bucket. `room`: items it has place for."""

    def __init__(self) -> None:
        self.view = memoryview(bytearray(2**20))
        self.room = 100
        self.sent: list[tuple[ChunkKey, Span, ItemShape]] = []
        self.untold: list[ChunkKey] = []

    def place(self, nbytes: int) -> Span | None:
        return Span(8192 * len(self.sent), nbytes) if len(self.sent) < self.room else None

    def send(self, key: ChunkKey, span: Span, shape: ItemShape, copy: Any) -> None:
        copy.wait()
        self.sent.append((key, span, shape))
        self.untold.append(key)

    def take_ends(self) -> ItemReport:
        told, self.untold = self.untold, []
        return ItemReport(
            Counter({"upload_ok": len(told)} if told else {}), dict.fromkeys(told, 60.0), {}
        )

    def close(self, drain_timeout_s: float) -> int:
        return 0


Make = Callable[..., ECWorkerSide]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    made: list[ECWorkerSide] = []

    def make(rank: int = 0, stage: int = 0, **directions: bool) -> ECWorkerSide:
        group = SimpleNamespace(rank_in_group=rank)
        monkeypatch.setattr(parallel_state, "get_tp_group", lambda: group)
        pipeline = SimpleNamespace(is_first_rank=stage == 0)
        monkeypatch.setattr(parallel_state, "get_pp_group", lambda: pipeline)
        monkeypatch.setattr(ec_worker, "encoder_fingerprint", lambda *args: {"model": "m"})
        monkeypatch.setattr(ec_worker, "MAX_ITEM_BYTES", 2**16)
        monkeypatch.setattr(ECWorkerSide, "_open_outbox", lambda self, *_: Outbox())
        config = Config(bucket="bkt")
        side = ECWorkerSide(
            config, vllm_config(), **({"may_load": False, "may_save": True} | directions)
        )
        made.append(side)
        return side

    yield make
    for side in made:
        side.shutdown()


ENGINE = uuid.uuid4().hex


def vllm_config() -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(dtype=torch.bfloat16),
        device_config=SimpleNamespace(device_type="cpu"),
        parallel_config=SimpleNamespace(data_parallel_rank=0),
        ec_transfer_config=SimpleNamespace(engine_id=ENGINE),
    )


def output(rows: int = ROWS, width: int = WIDTH) -> torch.Tensor:
    return torch.arange(rows * width, dtype=torch.float32).reshape(rows, width).bfloat16()


def encode(side: ECWorkerSide, tensor: torch.Tensor, plan: ItemPlan | None = None) -> ItemReport:
    """One step in which the encoder has made `tensor`."""
    side.begin(plan or ItemPlan(saves=(ItemSave("a", KEY, ROWS),)))
    side.save({"a": tensor}, "a")
    report = side.report()
    assert report is not None
    return report.report


def test_what_the_scheduler_ordered_is_saved_and_told(make: Make) -> None:
    side = make()
    report = encode(side, output())
    outbox: Any = side._outbox
    nbytes = object_bytes("BF16", ROWS, WIDTH)
    assert outbox.sent == [(KEY, Span(0, nbytes), ItemShape(ROWS, nbytes))]
    payload = bytes(outbox.view[HEADER_BYTES:nbytes])
    assert payload == output().view(torch.uint8).numpy().tobytes()
    assert [*report.uploaded] == [KEY]
    assert report.counters == {"encoded": 1, "encoded_rows": ROWS, "upload_ok": 1}
    assert report.encoded_rows == ROWS
    assert report.encode_seconds >= 0
    assert side.report() is None, "told once"


@pytest.mark.parametrize(
    ("tensor", "counter"),
    [
        (output(rows=ROWS + 1), "saves_unfit"),
        (output().float(), "saves_unfit"),
        (output().flatten(), "saves_unfit"),
        (output(width=10_000), "items_too_large"),
    ],
)
def test_what_is_not_as_expected_is_not_saved(
    make: Make, tensor: torch.Tensor, counter: str
) -> None:
    side = make()
    assert encode(side, tensor).counters[counter] == 1
    assert side._outbox.sent == []  # type: ignore[union-attr, attr-defined]


def test_what_finds_no_room_or_was_not_ordered_is_not_saved(make: Make) -> None:
    side = make()
    outbox: Any = side._outbox
    assert "saves" not in encode(side, output(), ItemPlan()).counters
    outbox.room = 0
    assert encode(side, output()).counters["saves_dropped"] == 1
    assert outbox.sent == []


@pytest.mark.parametrize("place", [{"rank": 1}, {"stage": 1}])
def test_one_rank_saves_and_counts(make: Make, place: dict[str, int]) -> None:
    side = make(**place)
    side.begin(ItemPlan(saves=(ItemSave("a", KEY, ROWS),)))
    side.save({"a": output()}, "a")
    assert side.report() is None
    assert side._outbox is None


def test_promised_items_are_loaded_whatever_is_broken(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    side = make(may_load=True)
    nbytes = object_bytes("BF16", ROWS, WIDTH)
    load = ItemLoad("b", 8192, nbytes, ROWS, WIDTH)
    with pytest.raises(RuntimeError, match="without a slab"):
        side.load((load,), {})
    slab = Slab.create(2**16)
    (word,) = offer_slab([worker_rendezvous(vllm_config(), 0)], slab, 10.0)
    assert len(word) == 32
    slab.view[8192 + HEADER_BYTES : 8192 + nbytes] = output().view(torch.uint8).numpy().tobytes()

    def fail(*args: Any) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(side, "_send", fail)
    side.begin(ItemPlan(saves=(ItemSave("a", KEY, ROWS),)))
    side.save({"a": output()}, "a")
    assert side.broken == "save"
    told = side.report()
    assert told is not None
    assert told.report.counters == {"internal_errors": 1}
    assert side.report() is None
    cache: dict[str, torch.Tensor] = {}
    side.begin(ItemPlan(loads=(load,)))
    side.load((load,), cache)
    assert torch.equal(cache["b"], output())
    assert "without its cache" in caplog.text
    slab.close()


def test_two_engines_with_one_id_are_told_apart(make: Make) -> None:
    make(may_load=True)
    with pytest.raises(ConfigError, match="engine_id is"):
        make(may_load=True)
