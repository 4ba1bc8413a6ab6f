"""What the planner tells of where chunks are: every change once, in order, after its origin."""

from __future__ import annotations

from s3kv.messages import JobKind
from s3kv.planning.residency import Change, Origin, Residency, ResidencyLog
from s3kv.types import ChunkKey, Outcome
from tests.unit.planning.desk import FAILED, MISSING, Desk, saving

HOST, BUCKET = Residency.HOST_STORED, Residency.BUCKET_STORED
EVICTED, GONE = Residency.HOST_REMOVED, Residency.BUCKET_REMOVED
NOTHING = Residency.NOTHING


def log(desk: Desk) -> list[Origin | Change]:
    residency = desk.planner.ledger.residency
    assert isinstance(residency, ResidencyLog)
    return residency.take()


def changes(desk: Desk) -> list[tuple[ChunkKey, Residency]]:
    return [(entry.key, entry.residency) for entry in log(desk) if isinstance(entry, Change)]


def test_a_fetched_chunk_is_in_both_tiers() -> None:
    desk = Desk(world_size=2)
    desk.ask("r", "aaaabbbb")
    a, b = desk.key("aaaa"), desk.key("aaaabbbb")
    assert log(desk) == [Origin(a, "r", 0), Origin(b, "r", 1)]
    fetches = desk.fetches()
    desk.end(fetches, ranks=1)
    assert log(desk) == [], "one rank alone has nothing"
    desk.end(fetches[:1], ranks=1)
    desk.end(fetches[1:], MISSING, ranks=1)
    assert changes(desk) == [(a, HOST), (a, BUCKET), (b, NOTHING)]


def test_a_saved_chunk_is_in_host_memory_first() -> None:
    desk, save = saving()
    key = desk.key("aaaa")
    assert log(desk) == [Origin(key, "r", 0)]
    desk.copied(save)
    assert changes(desk) == [(key, HOST)]
    desk.uploaded(save)
    assert changes(desk) == [(key, BUCKET)]


def test_what_could_not_be_copied_is_nowhere() -> None:
    desk, save = saving()
    desk.uploaded(save, FAILED)
    desk.end(save, FAILED, kind=JobKind.SAVE)
    assert changes(desk) == [(desk.key("aaaa"), NOTHING)]


def test_an_evicted_chunk_leaves_host_memory_and_stays_in_the_bucket() -> None:
    desk = Desk(slots=1)
    desk.make_resident("aaaa")
    log(desk)
    desk.make_resident("bbbb")
    a, b = desk.key("aaaa"), desk.key("bbbb")
    assert log(desk) == [
        Change(a, EVICTED),
        Origin(b, "for bbbb", 0),
        Change(b, HOST),
        Change(b, BUCKET),
    ]


def test_the_bucket_is_taken_back_when_it_has_lost_the_chunk() -> None:
    desk = Desk(slots=1)
    desk.make_resident("aaaa", "bbbb")
    log(desk)
    a = desk.key("aaaa")
    desk.make_resident("aaaa")
    of_a = [residency for key, residency in changes(desk) if key == a]
    # Readers count announcements, so the one of before is withdrawn first.
    assert of_a == [HOST, GONE, BUCKET], "it has shown it again"
    desk.make_resident("bbbb")
    desk.ask("r", "aaaa")
    log(desk)
    desk.end(desk.fetches(), Outcome.CORRUPT)
    assert changes(desk) == [(a, GONE), (a, NOTHING)]
    # Nobody is told again of what nobody was told of.
    desk.end(desk.fetches_for("s", "cccc"), MISSING)
    assert changes(desk) == [(desk.key("cccc"), NOTHING)]


def test_a_fetch_that_fails_says_nothing_about_the_bucket() -> None:
    desk = Desk(slots=1)
    desk.make_resident("aaaa", "bbbb")
    desk.ask("r", "aaaa")
    log(desk)
    desk.end(desk.fetches(), FAILED)
    assert changes(desk) == [(desk.key("aaaa"), NOTHING)]


def test_an_upload_that_is_given_up_changes_nothing() -> None:
    desk, save = saving()
    desk.copied(save)
    desk.uploaded(save, FAILED)
    for _ in range(4):
        desk.now_s += 100
        desk.uploaded(desk.uploads(), FAILED)
    assert changes(desk) == [(desk.key("aaaa"), HOST)]
