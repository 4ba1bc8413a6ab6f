"""The scheduler's account of the adapters (LoRA) that its workers report."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from vllm.lora.request import LoRARequest

from s3kv.connectors import adapter_loads
from s3kv.connectors.adapter_loads import AdapterReport, LoadedAdapter, hashed_name
from s3kv.connectors.adapters import KnownAdapters

A, B = LoRARequest("a", 1, "/a"), LoRARequest("b", 1, "/b")
LOADED = LoadedAdapter(hashed_name(A), b"content of a")
OTHER = LoadedAdapter(hashed_name(A), b"other content")


@pytest.fixture
def known() -> KnownAdapters:
    known = KnownAdapters()
    known.next_step()
    return known


def report(known: KnownAdapters, *adapters: LoadedAdapter, number: int = 0) -> list[str]:
    """The report of the last step planned, or of another: of the adapter number 1."""
    if not number:
        known.next_step()
        number = known.next_step().number - 1
    return known.on_report(AdapterReport(number, dict(zip([1], adapters, strict=False))))


def settled(known: KnownAdapters, adapter: LoRARequest, loaded: LoadedAdapter) -> bytes | None:
    """The digest of a request that comes before a report of what is loaded."""
    known.arrived("next", adapter, 0.0)
    report(known, loaded)
    return known.settle("next")[1]


def test_a_request_waits_for_a_report_of_a_step_planned_after_it(known: KnownAdapters) -> None:
    """Whatever was loaded before it came is in that one."""
    first = known.next_step().number
    assert known.arrived("r", A, 0.0) is None
    report(known, number=first)
    assert known.waits("r", 0.0), "this step may have begun before"
    report(known, LOADED, number=known.next_step().number)
    assert not known.waits("r", 0.0)
    assert known.settle("r") == (False, LOADED.digest)
    assert known.settle("r") == (True, None), "once"
    assert known.arrived("next", A, 0.0) == LOADED.digest
    report(known, LOADED)
    assert known.settle("next") == (True, LOADED.digest)
    assert not known.waits("without an adapter", 0.0)
    assert known.settle("without an adapter") == (True, None)


def test_without_a_report_it_goes_on_without_a_cache(known: KnownAdapters) -> None:
    report(known, LOADED)
    assert known.arrived("r", A, 0.0) == LOADED.digest
    assert known.waits("r", 9.0)
    assert not known.waits("r", 11.0)
    assert known.settle("r") == (False, None)


def test_requests_that_run_across_a_load_are_outdated(known: KnownAdapters) -> None:
    report(known, LOADED)
    for name in ("runs", "ends"):
        known.arrived(name, A, 0.0)
    report(known, LOADED)
    for name in ("runs", "ends"):
        assert known.settle(name) == (True, LOADED.digest)
    known.finished("ends")
    assert report(known, LOADED) == []
    assert report(known, OTHER) == ["runs"]
    assert report(known) == [], "once"


def test_two_names_with_one_number_have_no_cache(known: KnownAdapters) -> None:
    report(known, LOADED)
    known.arrived("one", A, 0.0)
    known.arrived("two", B, 0.0)
    report(known, LOADED)
    assert known.settle("one") == (True, LOADED.digest)
    assert known.settle("two") == (True, None)
    assert settled(known, B, LoadedAdapter(hashed_name(B), b"content of b")) is None, (
        "vLLM may hold KV of the wrong one"
    )


def test_two_names_of_a_number_that_is_not_loaded_yet(known: KnownAdapters) -> None:
    """Whichever is loaded first serves both."""
    known.arrived("one", A, 0.0)
    known.arrived("two", B, 0.0)
    report(known)
    assert [known.settle(name) for name in ("one", "two")] == [(True, None)] * 2
    for adapter in (A, B):
        assert settled(known, adapter, LoadedAdapter(hashed_name(adapter), b"content")) is None


def test_a_request_that_reads_the_files_in_every_step_has_no_cache(known: KnownAdapters) -> None:
    report(known, LOADED)
    assert settled(known, LoRARequest("a", 1, "/a", load_inplace=True), LOADED) is None


@pytest.fixture(autouse=True)
def forget_observers() -> Iterator[None]:
    yield
    adapter_loads._observers.clear()
