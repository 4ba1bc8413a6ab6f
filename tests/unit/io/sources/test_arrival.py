"""A read lands where it is told, and only if the place is its own."""

from __future__ import annotations

from s3kv.io.sources.arrival import Arrival
from s3kv.place import Place
from s3kv.stores.store import Receiver


def test_it_lands_where_the_length_says_and_reports_what_arrives() -> None:
    place, arrived = Place.of(bytearray(10)), list[int]()
    arrival: Receiver = Arrival(
        lambda: True, lambda nbytes: place.cut(10 - nbytes, 10), arrived.append
    )
    memory = arrival.begin(3)
    assert memory is not None
    memory.write(b"end")
    arrival.arrived(2)
    arrival.arrived(3)
    assert bytes(place) == bytes(7) + b"end"
    assert arrived == [2, 3]


def test_without_its_claim_it_does_not_land() -> None:
    landed: list[int] = []

    def land(nbytes: int) -> Place:
        landed.append(nbytes)
        return Place.of(b"")

    assert Arrival(lambda: False, land).begin(3) is None
    assert landed == []


def test_nobody_need_follow_it() -> None:
    arrival = Arrival(lambda: True, lambda _: Place.of(b""))
    assert arrival.begin(3) is not None
    arrival.arrived(3)
