"""What the scheduler makes of the workers' reports on adapters (LoRA)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from vllm.lora.request import LoRARequest

from s3kv.connectors.adapter_loads import (
    AdapterReport,
    LoadedAdapter,
    hashed_name,
)
from s3kv.connectors.adapters import KnownAdapters

A = LoRARequest("a", 1, "/a")
LOADED = LoadedAdapter(hashed_name(A), b"content of a")
OTHER = LoadedAdapter(hashed_name(A), b"other content")


@pytest.fixture
def known() -> KnownAdapters:
    known = KnownAdapters()
    known.next_step()
    return known


def hear(known: KnownAdapters, *adapters: tuple[int, LoadedAdapter], number: int = 0) -> list[str]:
    """The report of the last step planned, or of another."""
    if not number:
        known.next_step()
        number = known.next_step().number - 1
    return list(known.hear(AdapterReport(number, dict(adapters))))


def test_a_request_waits_for_a_report_of_a_step_planned_after_it(known: KnownAdapters) -> None:
    """Whatever was loaded before it came is in that one."""
    first = known.next_step().number
    assert known.arrived("r", A, 0.0) is None
    assert known.waits("r", 0.0)
    hear(known, number=first)
    assert known.waits("r", 0.0), "this step may have begun before"
    second = known.next_step().number
    hear(known, (1, LOADED), number=second)
    assert not known.waits("r", 0.0)
    assert known.settle("r") == (False, LOADED.digest)
    assert known.settle("r") == (True, None), "once"
    assert known.arrived("next", A, 0.0) == LOADED.digest
    hear(known, (1, LOADED))
    assert known.settle("next") == (True, LOADED.digest)


def test_without_a_report_it_goes_on_without_a_cache(known: KnownAdapters) -> None:
    hear(known, (1, LOADED))
    assert known.arrived("r", A, 0.0) == LOADED.digest
    assert known.waits("r", 9.0)
    assert not known.waits("r", 11.0)
    assert known.settle("r") == (False, None)


def test_an_adapter_that_was_loaded_anew_without_a_step(known: KnownAdapters) -> None:
    hear(known, (1, LOADED))
    assert known.arrived("r", A, 0.0) == LOADED.digest
    hear(known, (1, OTHER))
    assert known.settle("r") == (False, OTHER.digest)


def test_requests_that_run_across_a_load_are_told(known: KnownAdapters) -> None:
    hear(known, (1, LOADED))
    for name in ("runs", "ends"):
        known.arrived(name, A, 0.0)
    hear(known, (1, LOADED))
    for name in ("runs", "ends"):
        assert known.settle(name) == (True, LOADED.digest)
    known.finished("ends")
    assert hear(known, (1, LOADED)) == []
    assert hear(known, (1, OTHER)) == ["runs"]
    assert hear(known) == [], "once"


def test_two_names_with_one_number_have_no_cache(known: KnownAdapters) -> None:
    b = LoRARequest("b", 1, "/b")
    hear(known, (1, LOADED))
    known.arrived("one", A, 0.0)
    known.arrived("two", b, 0.0)
    hear(known, (1, LOADED))
    assert known.settle("one") == (True, LOADED.digest)
    assert known.settle("two") == (True, None)
    of_b = LoadedAdapter(hashed_name(b), b"content of b")
    hear(known, (1, of_b))
    known.arrived("three", b, 0.0)
    hear(known, (1, of_b))
    assert known.settle("three") == (True, None), "vLLM may hold KV of the wrong one"


def test_two_names_of_a_number_that_is_not_loaded_yet(known: KnownAdapters) -> None:
    """Whichever is loaded first serves both."""
    b = LoRARequest("b", 1, "/b")
    known.arrived("one", A, 0.0)
    known.arrived("two", b, 0.0)
    hear(known)
    assert [known.settle(name) for name in ("one", "two")] == [(True, None)] * 2
    for adapter in (A, b):
        loaded = LoadedAdapter(hashed_name(adapter), b"content")
        hear(known, (1, loaded))
        known.arrived("next", adapter, 0.0)
        hear(known, (1, loaded))
        assert known.settle("next") == (True, None)


def test_a_request_that_reads_the_files_in_every_step_has_no_cache(known: KnownAdapters) -> None:
    hear(known, (1, LOADED))
    known.arrived("r", LoRARequest("a", 1, "/a", load_inplace=True), 0.0)
    hear(known, (1, LOADED))
    assert known.settle("r") == (True, None)


def test_no_adapter_is_no_matter(known: KnownAdapters) -> None:
    assert not known.waits("plain", 0.0)
    assert known.settle("plain") == (True, None)
    known.finished("plain")


@pytest.fixture(autouse=True)
def forget_observers() -> Iterator[None]:
    from s3kv.connectors import adapter_loads

    yield
    adapter_loads._observers.clear()
