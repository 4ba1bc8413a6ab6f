"""The worker's side of the EC connector, driven by hand."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import vllm.distributed.parallel_state as parallel_state
from vllm.config import ParallelConfig

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
NBYTES = object_bytes("BF16", ROWS, WIDTH)
SAVES = ItemPlan(saves=(ItemSave("a", KEY, ROWS),))


class Outbox:
    """An outbox whose items are in the bucket at once. room: items between two `take_ends`."""

    def __init__(self) -> None:
        self.view = memoryview(bytearray(2**20))
        self.room = 100
        self.sent: list[tuple[ChunkKey, Span, ItemShape]] = []
        self.ended: list[ChunkKey] = []

    def place(self, nbytes: int) -> Span | None:
        return Span(8192 * len(self.sent), nbytes) if len(self.ended) < self.room else None

    def send(self, key: ChunkKey, span: Span, shape: ItemShape, copy: Any) -> None:
        copy.synchronize()
        self.sent.append((key, span, shape))
        self.ended.append(key)

    def take_ends(self) -> ItemReport:
        ended, self.ended = self.ended, []
        counters = Counter({"upload_ok": len(ended)} if ended else {})
        return ItemReport(counters, dict.fromkeys(ended, 60.0))

    def close(self, drain_timeout_s: float) -> int:
        return 0


Make = Callable[..., ECWorkerSide]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    made: list[ECWorkerSide] = []

    def make(
        rank: int = 0, stage: int = 0, *, may_load: bool = False, may_save: bool = True
    ) -> ECWorkerSide:
        group = SimpleNamespace(rank_in_group=rank)
        monkeypatch.setattr(parallel_state, "get_tp_group", lambda: group)
        pipeline = SimpleNamespace(is_first_rank=stage == 0)
        monkeypatch.setattr(parallel_state, "get_pp_group", lambda: pipeline)
        config = Config(bucket="bkt")
        side = ECWorkerSide(config, VLLM_CONFIG, may_load=may_load, may_save=may_save)
        made.append(side)
        return side

    monkeypatch.setattr(ec_worker, "encoder_fingerprint", lambda *args: {"model": "m"})
    monkeypatch.setattr(ec_worker, "MAX_ITEM_BYTES", 2**16)
    monkeypatch.setattr(ECWorkerSide, "_open_outbox", lambda self, *_: Outbox())
    yield make
    for side in made:
        side.shutdown()


VLLM_CONFIG: Any = SimpleNamespace(
    model_config=SimpleNamespace(dtype=torch.bfloat16),
    device_config=SimpleNamespace(device_type="cpu"),
    parallel_config=SimpleNamespace(data_parallel_index=0),
    ec_transfer_config=SimpleNamespace(engine_id=uuid.uuid4().hex),
)


def output(rows: int = ROWS, width: int = WIDTH) -> torch.Tensor:
    return torch.arange(rows * width, dtype=torch.float32).reshape(rows, width).bfloat16()


def encode(side: ECWorkerSide, tensor: torch.Tensor, plan: ItemPlan = SAVES) -> ItemReport | None:
    """The report of a step in which the encoder has made `tensor`."""
    side.begin(plan)
    side.save({"a": tensor}, "a")
    report = side.report()
    assert side.report() is None, "once"
    return None if report is None else report.report


def test_an_output_of_the_plan_is_saved_and_reported(make: Make) -> None:
    side = make()
    outbox: Any = side._outbox
    report = encode(side, output())
    assert outbox.sent == [(KEY, Span(0, NBYTES), ItemShape(ROWS, NBYTES))]
    assert bytes(outbox.view[HEADER_BYTES:NBYTES]) == output().view(torch.uint8).numpy().tobytes()
    assert [*report.uploaded] == [KEY]
    assert report.counters == {"encoded": 1, "encoded_rows": ROWS, "upload_ok": 1}
    assert report.encoded_rows == ROWS
    assert report.encode_seconds >= 0


@pytest.mark.parametrize(
    ("tensor", "plan", "room", "counter"),
    [
        (output(rows=ROWS + 1), SAVES, 1, "saves_unfit"),
        (output().float(), SAVES, 1, "saves_unfit"),
        (output().flatten(), SAVES, 1, "saves_unfit"),
        (output(width=10_000), SAVES, 1, "items_too_large"),
        (output(), SAVES, 0, "saves_dropped"),
        (output(), ItemPlan(), 1, ""),
    ],
)
def test_an_output_without_place_size_or_plan_is_not_saved(
    make: Make, tensor: torch.Tensor, plan: ItemPlan, room: int, counter: str
) -> None:
    side = make()
    outbox: Any = side._outbox
    outbox.room = room
    report = encode(side, tensor, plan)
    assert set(report.counters) - {"encoded", "encoded_rows"} == {counter} - {""}
    assert outbox.sent == []


def test_the_places_of_ended_uploads_are_free_within_a_step(make: Make) -> None:
    side = make()
    outbox: Any = side._outbox
    outbox.room = 1
    side.begin(ItemPlan(saves=tuple(ItemSave(name, KEY, ROWS) for name in "ab")))
    for name in "ab":
        side.save({name: output()}, name)
    assert len(outbox.sent) == 2


@pytest.mark.parametrize("place", [{"rank": 1}, {"stage": 1}])
def test_one_rank_saves_and_counts(make: Make, place: dict[str, int]) -> None:
    side = make(**place)
    assert encode(side, output()) is None
    assert side._outbox is None


@pytest.mark.parametrize("may_save", [True, False], ids=["both", "consumer"])
@pytest.mark.parametrize("tells", [True, False], ids=["first runner", "second runner"])
def test_an_output_is_counted_whether_or_not_vllm_tells_of_it(
    make: Make, may_save: bool, tells: bool
) -> None:
    """Its second model runner calls `save_caches` of producers alone."""
    side = make(may_load=True, may_save=may_save)
    cache = {"old": output()}
    side.begin(ItemPlan())
    side.load(cache)
    cache["a"] = output()
    if tells or may_save:
        side.save(cache, "a")
    found = side.report()
    assert found.report.counters == {"encoded": 1, "encoded_rows": ROWS}
    assert found.report.encoded_rows == ROWS, "with the time that it took"
    assert side.report() is None, "once"


LOADS = ItemPlan(loads=(ItemLoad("b", 8192, NBYTES, ROWS, WIDTH),))


def offered() -> Slab:
    """A slab with the item of `LOADS`, which the worker has."""
    slab = Slab.create(2**16)
    (word,) = offer_slab([worker_rendezvous(VLLM_CONFIG, 0)], slab, 10.0)
    assert len(word) == 32
    slab.view[8192 + HEADER_BYTES : 8192 + NBYTES] = output().view(torch.uint8).numpy().tobytes()
    return slab


def test_a_load_replaces_what_the_engine_has_under_the_name(make: Make) -> None:
    """An entry that vLLM evicts and makes anew in one pass stays with the worker. If the client has
    given the name to another picture meanwhile, it is that of the old one."""
    side = make(may_load=True)
    slab = offered()
    cache = {"b": output(rows=2 * ROWS)}
    side.begin(LOADS)
    side.load(cache)
    assert torch.equal(cache["b"], output())
    slab.close()


def test_promised_items_are_loaded_even_if_the_side_is_broken(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    side = make(may_load=True)
    side.begin(LOADS)
    with pytest.raises(RuntimeError, match="without a slab"):
        side.load({})
    slab = offered()
    monkeypatch.setattr(side, "_send", Mock(side_effect=KeyError("a bug")))
    report = encode(side, output())
    assert side.broken == "save"
    assert report == ItemReport({"internal_errors": 1})
    cache: dict[str, torch.Tensor] = {}
    side.begin(LOADS)
    side.load(cache)
    assert torch.equal(cache["b"], output())
    assert "without its cache" in caplog.text
    slab.close()


def test_uploads_end_before_a_device_that_has_failed_is_closed(make: Make) -> None:
    side = make()
    side._outbox = outbox = Mock(close=Mock(return_value=0))
    side._copies = Mock(close=Mock(side_effect=[RuntimeError("lost"), None]))
    with pytest.raises(RuntimeError, match="lost"):
        side.shutdown()
    outbox.close.assert_called_once()


def test_two_engines_with_one_id_are_told_apart(make: Make) -> None:
    make(may_load=True)
    with pytest.raises(ConfigError, match="engine_id is"):
        make(may_load=True)


def test_data_parallel_ranks_of_one_id_do_not_meet() -> None:
    """vLLM runs those of a dense model as engines with rank 0, and leaves them the same id."""

    def names(index: int) -> set[str]:
        parallel = ParallelConfig(data_parallel_size=2)
        parallel.data_parallel_index = index  # as `EngineCoreProc.run_engine_core`
        parallel.reconfigure_for_independent_dp_rank()
        config: Any = SimpleNamespace(
            parallel_config=parallel, ec_transfer_config=VLLM_CONFIG.ec_transfer_config
        )
        return {worker_rendezvous(config, rank) for rank in range(2)}

    assert len(names(0) | names(1)) == 4
