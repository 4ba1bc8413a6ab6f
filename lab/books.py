"""The books of planners, ledger and tables, recomputed: `check` raises AssertionError where an
index differs from what it stands for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from s3kv.host.room import EqualSlots, Extents, order_of
from s3kv.host.table import Entry, EntryState, Table
from s3kv.library.block_table import BlockTable
from s3kv.messages import JobKind
from s3kv.planning.ec import ECPlanner
from s3kv.planning.kv import KVPlanner
from s3kv.planning.ledger import Ledger
from s3kv.planning.offload import OffloadPlanner
from s3kv.types import ChunkKey

FREE, RESERVED, *_ = EntryState


def check(of: KVPlanner | ECPlanner | Ledger | Table | EqualSlots | Extents | BlockTable) -> None:
    """Check the books of an object, and those of what it owns."""
    CHECKS[type(of)](of)


def _kv_planner(planner: KVPlanner) -> None:
    check(planner.ledger)
    leased = Counter(
        entry
        for request in (*planner._requests.values(), *planner._orphans.values())
        for lookup in request.lookups
        for entry in (*lookup.leases, *lookup.early.values())
    )
    for entry, pins in leased.items():
        assert entry.pins == pins, (entry, pins)
    assert planner.ledger.table.statistics().pinned == len(leased)


def _ec_planner(planner: ECPlanner) -> None:
    check(planner.ledger)
    pins: Counter[ChunkKey] = Counter()
    for request_id, request in planner._requests.items():
        pins.update(item.key for item in request.leases.values())
        for identifier, job in request.pending.items():
            assert planner.ledger.fetch_job(request.asked[identifier].key) is job
            assert (request_id, identifier) in job.waiters
    pins.update(item.key for item, _ in planner._promises.values())
    pins.update(item.key for items in planner._loading for item in items)
    assert pins == Counter({e.key: e.pins for e in planner.ledger.table.entries() if e.pins})


def _ledger(ledger: Ledger) -> None:
    check(ledger.table)
    jobs = [job for job in ledger._jobs.values() if job.kind is not JobKind.USE]
    assert len(ledger._jobs) - len(jobs) == ledger.uses_inflight
    fetching = sum(job.is_fetch for job in jobs)
    assert fetching == ledger.fetches_inflight, (fetching, ledger.fetches_inflight)
    saving = len(jobs) - fetching + len(ledger._retries)
    assert saving == ledger.saves_inflight, (saving, ledger.saves_inflight)
    reserved = (job.entry for job in jobs if job.entry.state is EntryState.RESERVED)
    filling = sum(entry.units for entry in reserved)
    assert filling == ledger.table.statistics().reserved, "a reserved place has no job"
    dirty = {e.key for e in ledger.table.entries() if e.state is EntryState.DIRTY}
    assert saving >= len(dirty), "a dirty entry is on its way nowhere"
    assert all(ledger._jobs[job.job_id] is job for job in ledger._job_of.values())
    beside = [job for job in jobs if ledger._job_of.get(job.key) is not job]
    assert all(job.is_fetch for job in beside), "two jobs fill one entry"
    assert all(ledger.table.lookup(job.key) is not job.entry for job in beside)
    for key in ledger.unsaved:
        entry = ledger.table.lookup(key)
        assert entry is not None, f"{key} is unsaved and not resident"
        assert entry.state is EntryState.CLEAN, f"{key} is unsaved and on its way"
        assert not ledger.index.is_present(key), f"{key} is unsaved and in the bucket"
    copying = [job for job in jobs if job.reports_left.get(JobKind.SAVE)]
    readers = {(block, job.job_id) for job in copying for block in job.block_ids}
    fenced = {(block, job) for block, ids in ledger._saving_blocks.items() for job in ids}
    assert readers == fenced, readers ^ fenced


def _table(table: Table) -> None:
    entries = list(table._at.values())
    index = {
        ChunkKey(group, block_hash): entry
        for group, held in table._groups.items()
        for block_hash, entry in held.items()
    }
    check(table._room)
    assert all(e.state is not FREE for e in entries), "an entry that is gone has a place"
    assert all(e.number == n for n, e in table._at.items()), "an entry is at another place"
    assert all(e.key == key for key, e in index.items()), "the index by key is wrong"
    reserved = [entry for entry in entries if entry.state is RESERVED]
    assert {*index.values(), *reserved} == {*entries}, "two entries have one key"
    units = _units_by_state(entries)
    units[FREE] = table._room.count - sum(units)
    assert units == table._units, "units by state: miscounted"
    assert units[FREE] == _free_units(table._room), "the room has other free units"
    pinned = _units_by_state(entry for entry in entries if entry.pins)
    assert pinned == table._pinned, "pinned units by state: miscounted"
    assert all(e.is_resident for e in entries if e.pins), "what is not resident is pinned"
    resident = {entry.number for entry in entries if entry.is_resident}
    assert resident == set(table._lru), "the queue is not what is resident"


def _units_by_state(entries: Iterable[Entry]) -> list[int]:
    counts = [0] * len(EntryState)
    for entry in entries:
        counts[entry.state] += entry.units
    return counts


def _free_units(room: EqualSlots | Extents) -> int:
    if isinstance(room, EqualSlots):
        return len(room._free)
    return sum(len(starts) << order for order, starts in enumerate(room._free))


def _equal_slots(slots: EqualSlots) -> None:
    assert len(set(slots._free)) == len(slots._free), "a slot is free twice"
    assert set(slots._free) <= set(range(slots.count)), "a free slot is none of the slab"


def _extents(extents: Extents) -> None:
    owners = [0] * extents.count
    for start, pages in extents._taken.items():
        assert start % (1 << order_of(pages)) == 0, f"the extent at {start} is misaligned"
        for page in range(start, start + pages):
            owners[page] += 1
    for order, starts in enumerate(extents._free):
        for start in starts:
            assert start % (1 << order) == 0, f"the free block at {start} is misaligned"
            assert start ^ (1 << order) not in starts, "buddies that were not joined"
            for page in range(start, start + (1 << order)):
                owners[page] += 1
    assert owners == [1] * extents.count, "a page is taken twice, or lost"


def _block_table(table: BlockTable) -> None:
    blocks = table._blocks.items()
    assert table._named == {b.key: n for n, b in blocks if b.key is not None}
    assert set(table._idle) == {n for n, b in blocks if b.key is not None and not b.in_use}
    assert sorted(table._free) == sorted(n for n, b in blocks if b.key is None and not b.in_use), (
        "the free list is not the blocks nobody names or uses"
    )


def _offload_planner(planner: OffloadPlanner) -> None:
    transfers, requests = planner.transfers, planner._requests.values()
    jobs = list(transfers.jobs.values())
    assert transfers.fetches == sum(job.transfer.is_load for job in jobs)
    assert transfers.uploads == sum(not job.transfer.is_load for job in jobs)
    for transfer in transfers._transfers.values():
        assert transfer.jobs_left == sum(job.transfer is transfer for job in jobs) > 0
    assert planner._promised == sum(len(request.promised) for request in requests)
    for request in requests:
        assert request.new.keys() <= request.promised
        probes = sum(transfers.jobs[job_id].is_probe for job_id in request.fetching.values())
        assert request.probes == probes + sum(request.new.values())
    assert planner._probes == sum(request.probes for request in requests)
    assert planner._names.keys() == {*planner.index.due}


CHECKS: dict[type, Callable[[Any], None]] = {
    KVPlanner: _kv_planner,
    ECPlanner: _ec_planner,
    Ledger: _ledger,
    Table: _table,
    EqualSlots: _equal_slots,
    Extents: _extents,
    BlockTable: _block_table,
    OffloadPlanner: _offload_planner,
}
