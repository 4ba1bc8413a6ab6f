"""What the planner of encoder outputs decides, one situation at a time."""

from __future__ import annotations

import pytest

from lab.books import check
from s3kv.messages import ItemLoad, ItemReport, ItemSave
from s3kv.objects.item_format import object_bytes
from s3kv.planning.items import ItemSizes, Wanted
from s3kv.planning.pace import FetchTime
from s3kv.types import Outcome
from tests.unit.planning.ec_desk import MIB, WIDTH, Desk, nbytes, wanted

A, B = wanted("a"), wanted("b")


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_an_item_in_the_bucket_is_waited_for_and_loaded(desk: Desk) -> None:
    desk.bucket.add(A.key)
    assert not desk.ensure("r", A)
    assert not desk.planner.promise("a"), "it has not arrived"
    desk.planner.plan(())
    desk.answer()
    assert desk.ensure("r", A)
    plan = desk.schedule("r", A)
    assert plan.loads == (ItemLoad("a", 0, nbytes(A), A.rows, WIDTH),)
    assert plan.saves == ()
    assert desk.planner.counters["hits"] == 1
    assert desk.planner.counters["hit_rows"] == A.rows


def test_an_item_nobody_has_is_encoded_and_saved(desk: Desk) -> None:
    assert not desk.ensure("r", A)
    desk.answer()
    assert desk.ensure("r", A)
    plan = desk.schedule("r", A)
    assert (plan.loads, plan.saves) == ((), (ItemSave("a", A.key, A.rows),))
    # It is not asked for again as long as the bucket's answer counts.
    desk.planner.plan(("a",))
    assert desk.ensure("s", A)
    assert desk.orders == []


def test_an_item_of_a_private_request_is_encoded_and_not_saved(desk: Desk) -> None:
    assert not desk.ensure("r", A)
    desk.answer()
    assert desk.ensure("r", A)
    plan = desk.schedule("r", A, saves=False)
    assert (plan.loads, plan.saves) == ((), ())
    desk.planner.plan(("a",))
    assert desk.schedule("public", A).saves == (ItemSave("a", A.key, A.rows),)


def test_what_the_engine_holds_is_not_asked_for(desk: Desk) -> None:
    desk.ensure("r", A)
    desk.answer()
    desk.schedule("r", A)
    desk.now_s = 100.0
    assert desk.ensure("s", A)
    assert desk.orders == []
    desk.planner.plan(("a",))
    assert not desk.ensure("t", A), "the engine has dropped it"


def two_names() -> tuple[Wanted, Wanted]:
    """One image that a client sends under two names."""
    first = wanted("a")
    return first, first._replace(identifier="b")


def test_one_item_under_two_names_is_one_fetch_and_two_loads(desk: Desk) -> None:
    first, second = two_names()
    desk.bucket.add(first.key)
    assert not desk.ensure("r", first, second)
    desk.answer()
    assert not desk.orders, "one fetch"
    assert desk.ensure("r", first, second)
    for item in (first, second):
        assert desk.planner.promise(item.identifier) is not None
    check(desk.planner)


def test_an_abort_cancels_the_one_fetch_for_two_names(desk: Desk) -> None:
    first, second = two_names()
    assert not desk.ensure("r", first, second)
    desk.planner.finished("r")
    assert len(desk.planner.take_cancels()) == 1
    desk.answer()
    check(desk.planner)


def test_who_joins_a_fetch_leases_the_item_under_its_own_names(desk: Desk) -> None:
    shared, other = wanted("a"), wanted("other")
    desk.bucket |= {shared.key, other.key}
    desk.ensure("before", other)
    desk.answer()
    desk.planner.finished("before")
    desk.ensure("q", shared._replace(identifier="b"))
    desk.ensure("r", shared, other._replace(identifier="b"))
    desk.answer()
    desk.planner.finished("q")
    desk.planner.finished("r")
    desk.planner.plan(())
    assert desk.planner.ledger.table.statistics().pinned == 0


def test_an_aborted_request_cancels_what_nobody_else_wants(desk: Desk) -> None:
    desk.ensure("r", A)
    desk.planner.finished("r")
    assert desk.planner.take_cancels() == [1]
    held = desk.planner.ledger.table.lookup(A.key)
    assert not held.is_resident, "its place is not free before the fetch has ended"
    assert not desk.ensure("s", A), "whoever joins a cancelled fetch waits for its end"
    desk.answer(Outcome.CANCELLED)
    assert desk.ensure("s", A)
    assert desk.planner.ledger.table.lookup(A.key) is None


def test_a_promised_item_stays_until_no_step_can_be_loading_it() -> None:
    big, other = wanted("big", rows=8_000), wanted("other", rows=8_000)
    desk = Desk(slab_bytes=MIB, steps_inflight=2)
    desk.resident(big)
    desk.ensure("r", big)
    assert desk.schedule("r", big).loads
    desk.planner.finished("r")  # aborted while the step that loads it runs
    desk.ensure("s", other)
    assert desk.orders == [], "no room: the step may be reading it"
    desk.planner.plan(())
    desk.ensure("t", other)
    assert desk.orders == []
    desk.planner.plan(())
    desk.ensure("u", other)
    assert len(desk.orders) == 1


def test_a_preempted_request_asks_again_for_what_it_had() -> None:
    big, other = wanted("big", rows=8_000), wanted("other", rows=8_000)
    desk = Desk(slab_bytes=MIB, steps_inflight=0)
    desk.resident(big)
    desk.ensure("r", big)
    desk.schedule("r", big)
    desk.resident(other)
    desk.planner.plan(("big",))
    assert not desk.ensure("r", big)


def test_a_promise_the_engine_does_not_take_up_is_withdrawn(desk: Desk) -> None:
    desk.resident(A)
    desk.ensure("r", A)
    assert desk.planner.promise("a")
    assert desk.planner.plan(()).loads == ()
    check(desk.planner)
    assert len(desk.schedule("r", A).loads) == 1


def test_what_is_too_large_is_never_asked_for() -> None:
    desk = Desk(max_item_bytes=MIB)
    assert desk.ensure("r", wanted("huge", rows=MIB))
    assert desk.orders == []
    assert desk.planner.counters["items_too_large"] == 1


def test_room_is_for_the_widest_until_the_first_item_has_told(desk: Desk) -> None:
    desk.bucket |= {A.key, B.key}
    desk.ensure("r", A)
    assert desk.orders[0][0].item.nbytes == object_bytes("BF16", A.rows, 8 * WIDTH)
    desk.answer()
    held = desk.planner.ledger.table.lookup(A.key)
    assert held.nbytes == nbytes(A), "what it did not need is free again"
    desk.ensure("r", A, B)
    assert desk.orders[0][0].item.nbytes == nbytes(B)


def test_one_identifier_for_two_sizes_is_promised_to_nobody(desk: Desk) -> None:
    other = wanted("a", rows=A.rows + 1)
    desk.resident(A)
    desk.ensure("r", A)
    assert desk.planner.promise("a")
    desk.planner.plan(())
    desk.ensure("s", other)
    assert not desk.planner.promise("a")
    desk.planner.finished("s")
    assert desk.planner.promise("a")


@pytest.mark.parametrize("saves", [True, False], ids=["in the bucket", "private"])
def test_a_name_is_saved_as_what_the_engine_encodes_under_it_last(desk: Desk, saves: bool) -> None:
    """vLLM may preempt a request in the pass that has placed its item, and place another."""
    desk.planner.allocated("r", A, 0.0, saves=True)
    desk.planner.ledger.index.note_present(B.key)
    assert desk.schedule("s", A._replace(key=B.key), saves=saves).saves == ()


def test_what_the_bucket_has_is_not_saved_again(desk: Desk) -> None:
    desk.planner.on_report(ItemReport(uploaded={A.key: 60.0}), 0.0)
    assert desk.schedule("r", A).saves == ()
    assert len(desk.schedule("r", B).saves) == 1


def test_a_consumer_saves_nothing_and_a_producer_loads_nothing() -> None:
    consumer = Desk(may_save=False)
    consumer.ensure("r", A)
    consumer.answer()
    assert consumer.schedule("r", A).saves == ()
    producer = Desk(may_load=False)
    assert producer.ensure("r", A)
    assert producer.orders == []
    assert not producer.planner.promise("a")
    assert len(producer.schedule("r", A).saves) == 1
    producer.planner.on_report(ItemReport(uploaded={A.key: 60.0}), 0.0)
    assert producer.schedule("s", A).saves == ()
    producer.now_s = 60.0
    assert len(producer.schedule("t", A).saves) == 1, "the bucket may have deleted it"


def test_nobody_waits_longer_than_encoding_takes(desk: Desk) -> None:
    fifty = wanted("fifty", rows=50)
    assert not desk.ensure("r", fifty)
    desk.now_s = 0.49
    assert not desk.ensure("r", fifty)
    desk.now_s = 0.5
    assert desk.ensure("r", fifty)
    assert desk.planner.counters["deadline_cuts"] == 1
    desk.now_s = 0.6
    assert desk.ensure("r", fifty), "it never waits for the same item again"
    # What arrives late serves the next one.
    desk.bucket.add(fifty.key)
    desk.planner.finished("r")
    assert desk.planner.take_cancels() == []
    desk.answer()
    assert desk.ensure("s", fifty)
    assert desk.planner.promise("fifty")


def test_a_bucket_known_to_be_slower_than_the_encoder_is_not_waited_for(desk: Desk) -> None:
    desk.planner.pace.fetch.add(nbytes(A), 2.0)
    assert desk.ensure("r", A)
    assert len(desk.orders) == 1, "but asked, for the next one"


def test_a_bucket_whose_answers_take_longer_than_encoding_is_not_waited_for(desk: Desk) -> None:
    assert not desk.ensure("r", A), "a second to encode"
    desk.answer(seconds=1.2)
    assert desk.ensure("r", A)
    assert desk.ensure("s", B), "nothing has been fetched, but an absence has been told"
    assert len(desk.orders) == 1


def test_more_is_expected_of_a_bucket_that_is_slow_but_worth_it() -> None:
    desk = Desk(max_wait_s=100.0, slab_bytes=64 * 2**20)
    large, next_one = wanted("large", rows=5_000), wanted("next", rows=5_000)  # 50 s to encode
    desk.planner.pace.fetch.add(nbytes(large), 10.0)
    assert not desk.ensure("r", large)
    desk.now_s = 19.9
    assert not desk.ensure("r", large), "twice what is expected"
    desk.now_s = 20.0
    assert desk.ensure("r", large)
    # Giving up counts as twice what was waited; forty seconds still pay, eighty do not.
    assert not desk.ensure("s", next_one)
    desk.now_s = 60.0
    assert desk.ensure("s", next_one)
    assert desk.ensure("t", wanted("third", rows=5_000))
    desk.planner.pace.fetch.add(nbytes(large), 10.0)
    assert not desk.ensure("u", wanted("fourth", rows=5_000)), "it answers again"


def test_what_was_waited_already_is_not_expected_again(desk: Desk) -> None:
    desk.planner.pace.fetch.add(nbytes(A), 0.8)  # 0.9 s is where waiting for it stops to pay
    assert not desk.ensure("r", A, wanted("b"))
    desk.bucket.add(A.key)
    desk.now_s = 0.75
    desk.answer()
    assert not desk.ensure("r", A, wanted("b")), "the second is due in a moment"


def test_how_long_to_wait_is_only_thought_about_when_something_has_happened(
    desk: Desk,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    desk.bucket |= {A.key, B.key}
    thoughts = 0

    def counted(fetch: FetchTime, nbytes: float) -> None:
        nonlocal thoughts
        thoughts += 1

    monkeypatch.setattr(FetchTime, "at", counted)
    assert not desk.ensure("r", A, B)
    for _ in range(5):
        desk.now_s += 0.01
        assert not desk.ensure("r", A, B)
        assert desk.planner.waits("r", desk.now_s)
    assert thoughts == 1
    desk.answer()
    assert not desk.ensure("r", A, B)
    assert thoughts == 2
    desk.planner.on_report(ItemReport(encoded_rows=10_000, encode_seconds=0.01), 0.0)
    assert not desk.planner.waits("r", desk.now_s), "the encoder has shown to be faster"
    assert thoughts == 3
    assert desk.ensure("r", A, B)


@pytest.mark.parametrize("outcome", [Outcome.CORRUPT, Outcome.FAILED, Outcome.DENIED])
def test_what_does_not_verify_is_encoded(desk: Desk, outcome: Outcome) -> None:
    desk.bucket.add(A.key)
    desk.ensure("r", A)
    desk.answer(outcome)
    assert desk.ensure("r", A)
    assert not desk.planner.promise("a")
    assert len(desk.schedule("r", A).saves) == 1
    assert desk.planner.ledger.table.lookup(A.key) is None
    assert desk.planner.counters[f"fetch_{outcome.name.lower()}"] == 1


def test_a_pass_looks_at_each_fetch_once_however_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine asks about every waiting request in every pass, and after most something is new."""
    desk, items, looks = Desk(), [wanted(f"item {n}") for n in range(100)], [0]
    expected = ItemSizes.expected

    def counted(sizes: ItemSizes, item: Wanted) -> int:
        looks[0] += 1
        return expected(sizes, item)

    monkeypatch.setattr(ItemSizes, "expected", counted)
    for item in items:
        desk.bucket.add(item.key)
        desk.ensure(item.identifier, item)
    assert looks[0] < 4 * len(items), "they arrive in one pass"
    for _ in range(3):
        looks[0] = 0
        desk.answer()
        assert sum(desk.planner.waits(i.identifier, desk.now_s) for i in items) == len(desk.orders)
        assert looks[0] < 2 * len(items)
